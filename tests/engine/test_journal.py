"""Files that go on after a kill, and files that are refused."""

import json
from pathlib import Path

import pytest

from mmflash_jax.engine.journal import Journal
from mmflash_jax.weights.hf_config import ConfigError

HEADER = {"target": "demo", "seed": 0, "ids": [1, 2]}


def journal(tmp_path: Path, **changes: object) -> Journal:
    return Journal(tmp_path / "lines.jsonl", {**HEADER, **changes}, "do it again")


def write(made: Journal, keep: int, *batches: list[object]) -> None:
    with made.append(keep) as append:
        for batch in batches:
            append(batch)


def test_lines_come_back(tmp_path):
    made = journal(tmp_path)
    assert made.read() == []
    write(made, 0, [[1, 2], None], [{"score": [0.1]}])
    assert made.read() == [[1, 2], None, {"score": [0.1]}]
    assert json.loads(made.path.read_text().splitlines()[0]) == HEADER


def test_whatever_a_kill_leaves_ends_as_the_same_file(tmp_path):
    made = journal(tmp_path)
    lines = [[1, 22], [333], None, [4]]
    write(made, 0, lines)
    whole = made.path.read_bytes()
    for size in range(len(whole) + 1):
        made.path.write_bytes(whole[:size])
        known = made.read()
        assert known == lines[: len(known)]
        write(made, len(known), lines[len(known) :])
        assert made.path.read_bytes() == whole, f"killed after {size} bytes"


def test_later_lines_are_cut_off(tmp_path):
    made = journal(tmp_path)
    write(made, 0, [1, 2, 3])
    write(made, 1, [4])
    assert made.read() == [1, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed is 0 there and 1 in the config; remove the file to do it again"),
        ({"ids": (1, 3)}, r"ids is \[1, 2\] there and \[1, 3\] in"),
        ({"more": "x"}, "more is None there and 'x' in"),
    ],
)
def test_another_header_is_refused_by_name(tmp_path, change, message):
    write(journal(tmp_path), 0, [1])
    before = journal(tmp_path).path.read_bytes()
    with pytest.raises(ConfigError, match=message):
        journal(tmp_path, **change).read()
    assert journal(tmp_path).path.read_bytes() == before


def test_a_field_that_only_the_file_has_is_refused_too(tmp_path):
    write(journal(tmp_path, later="y"), 0, [1])
    with pytest.raises(ConfigError, match="later is 'y' there and None in"):
        journal(tmp_path).read()


@pytest.mark.parametrize(
    "content", ["no journal", '{"target": "demo", "seed": 1, "i', "[1]\n[2]\n"]
)
def test_foreign_files_are_refused(tmp_path, content):
    path = journal(tmp_path).path
    path.write_text(content)
    with pytest.raises(ConfigError, match="made with other settings: header is "):
        journal(tmp_path).read()
    assert path.read_text() == content


def test_damage_inside_is_named(tmp_path):
    made = journal(tmp_path)
    write(made, 0, [1, 2])
    made.path.write_bytes(made.path.read_bytes().replace(b"\n1\n", b"\n{]\n"))
    with pytest.raises(ConfigError, match=r"lines\.jsonl:2 is damaged; remove"):
        made.read()
