"""Tables and plots from records alone."""

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from mmflash_jax.evaluation import tables
from mmflash_jax.evaluation.records import Record
from mmflash_jax.evaluation.tables import markdown, read_records, write_all
from mmflash_jax.weights.hf_config import ConfigError


def record(method: str, benchmark: str, slots: int = 1, **changes) -> Record:
    made = dict.fromkeys(tables.CSV_COLUMNS) | {
        "target": "org/T-4B", "method": method, "benchmark": benchmark, "concurrency": slots,
        "tau": 5.0, "tokens_per_s": 1500.0, "plain_tokens_per_s": 500.0, "speedup": 3.0,
        "parity": True, "rows_equal": 63, "numeric_ties": 1, "questions": 64, "accuracy": 0.75,
        "accepted_per_position": [0.9, 0.8], "device": "1 x NVIDIA H200 (x86_64)",
        "dtype": "bfloat16", "seed": 0,
    }  # fmt: skip
    return made | changes


def plain(benchmark: str, slots: int = 1) -> Record:
    return record(
        "none", benchmark, slots, tau=1.0, speedup=1.0, tokens_per_s=500.0, numeric_ties=0,
        rows_equal=64, accepted_per_position=[],
    )  # fmt: skip


WRONG = {
    "tokens_per_s": None, "speedup": None, "parity": False, "rows_equal": 60,
    "withheld": "4 of 64 answers are not those of plain decoding",
}  # fmt: skip

RECORDS = [
    record("ours", "MMStar", tau=4.0, speedup=2.0, tokens_per_s=1000.0),
    plain("MMStar"),
    plain("ChartQA"),
    record("ours", "ChartQA"),
    plain("ChartQA", 8),
    record("ours", "ChartQA", 8, speedup=1.5, tokens_per_s=12345.6),
    record("theirs", "ChartQA", **WRONG),
    record("theirs", "MMStar", accuracy=None),
]


def rows(text: str, title: str) -> list[list[str]]:
    """Cells of the table under a heading."""
    lines = text.split(f"## {title}")[1].split("\n## ")[0].splitlines()
    cut = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return [cut[0], *cut[2:]]


def test_tau_and_speedup_by_method_and_benchmark():
    """The order of benchmarks is that of the published cards, plain decoding comes first."""
    assert rows(markdown(RECORDS), "tau / speed-up, 1 in flight") == [
        ["method", "ChartQA", "MMStar", "average"],
        ["none", "1.00 / 1.00", "1.00 / 1.00", "1.00 / 1.00"],
        ["ours", "5.00 / 3.00", "4.00 / 2.00", "4.50 / 2.50"],
        ["theirs", "5.00 / withheld", "5.00 / 3.00", "5.00 / withheld"],
    ]


def test_tokens_a_second_by_requests_in_flight():
    """A benchmark that was not measured leaves a gap, and no average over the others."""
    assert rows(markdown(RECORDS), "ours: decoded tokens/s") == [
        ["in flight", "ChartQA", "MMStar", "average"],
        ["1", "1,500 (3.00)", "1,000 (2.00)", "1,250 (2.50)"],
        ["8", "12,346 (1.50)", "-", "-"],
    ]
    assert rows(markdown(RECORDS), "theirs: decoded tokens/s")[1] == [
        "1", "withheld", "1,500 (3.00)", "withheld",
    ]  # fmt: skip


def test_accuracy_and_equal_answers():
    found = {row[0]: row[1:] for row in rows(markdown(RECORDS), "Accuracy by simple rules")}
    assert found["none, 1"] == ["75.0 %, 64 of 64"] * 2 + ["75.0 %, 128 of 128"]
    assert found["ours, 1"][0] == "75.0 %, 63 of 64, 1 ties"
    assert found["ours, 8"] == ["75.0 %, 63 of 64, 1 ties", "-", "-"]
    assert found["theirs, 1"][1] == "-, 63 of 64, 1 ties"


def test_refused_speeds_are_explained():
    text = markdown(RECORDS)
    assert f"- theirs on ChartQA, 1 in flight: {WRONG['withheld']}" in text
    assert "withheld" not in markdown(RECORDS[:6])


def test_a_cpu_is_named():
    assert "**Measured on a CPU**" not in markdown(RECORDS)
    assert "**Measured on a CPU**" in markdown([record("ours", "ChartQA", device="1 x cpu (x86)")])


def test_one_benchmark_has_no_average():
    text = markdown([plain("charts"), record("ours", "charts")])
    assert rows(text, "tau / speed-up")[0] == ["method", "charts"]


def save(file: Path, records: list[Record]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in ({"header": 1}, *records)))
    return file


def test_files_of_several_targets(tmp_path, monkeypatch, capsys):
    a = save(tmp_path / "a.jsonl", RECORDS)
    b = save(tmp_path / "b.jsonl", [record("ours", "charts", target="other")])
    monkeypatch.setattr("sys.argv", ["tables", str(a), str(b), "--output", str(tmp_path / "out")])
    assert tables.main() == 0
    text = (tmp_path / "out" / "tables.md").read_text()
    assert capsys.readouterr().out == text
    assert text.index("# org/T-4B") < text.index("# other")
    for target in ("T-4B", "other"):
        for plot in ("tau", "speedup", "positions"):
            with Image.open(tmp_path / "out" / f"{target}_{plot}.png") as image:
                assert image.width > 400
    with (tmp_path / "out" / "records.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == len(RECORDS) + 1
    assert (lines[3]["method"], lines[3]["tau"], lines[3]["speedup"]) == ("ours", "5.0", "3.0")
    assert lines[6]["speedup"] == ""


def test_records_that_contradict_each_other_are_refused(tmp_path, monkeypatch, capsys):
    a, b = (save(tmp_path / name, RECORDS) for name in ("a.jsonl", "b.jsonl"))
    with pytest.raises(ConfigError, match=r"two records of org/T-4B / ours / MMStar / 1"):
        read_records([a, b])
    with pytest.raises(ConfigError, match="holds no records"):
        read_records([save(tmp_path / "c.jsonl", [])])
    monkeypatch.setattr("sys.argv", ["tables", str(a), str(b), "--output", str(tmp_path / "out")])
    assert tables.main() == 2
    assert "two records" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_plots_without_drafts_or_with_withheld_speeds(tmp_path):
    write_all([plain("charts")], tmp_path / "plain")
    write_all([record("ours", "charts", **WRONG)], tmp_path / "wrong")
    write_all(RECORDS, tmp_path / "all")
    assert len(list(tmp_path.glob("*/*.png"))) == 9
