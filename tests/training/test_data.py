"""Training rows and batches, and where the prompts come from."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmflash_jax.config import SamplingSettings
from mmflash_jax.config_train import ChartData, FileData
from mmflash_jax.decode.records import Prompt
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.load import load_target
from mmflash_jax.registry import pair
from mmflash_jax.training.data import collate, make_row, prompt_requests
from mmflash_jax.training.prompts import places_of
from mmflash_jax.training.provenance import files_hash
from mmflash_jax.training.token_weights import TokenWeights
from mmflash_jax.weights.hf_config import ConfigError


def prompt(length: int, media: int = 0) -> Prompt:
    """Ids 100, 101, ...; the first `media` tokens are an image's; M-RoPE lags behind by 3."""
    places = np.arange(length, dtype=np.int32)
    return Prompt(
        ids=places + 100,
        media_idx=np.where(places < media, places, -1).astype(np.int32),
        positions=np.stack([places] * 3),
        rope_shift=-3,
        images=(),
        max_tokens=8,
    )


def media(rows: int, value: float = 0.0) -> np.ndarray:
    return np.full((rows, 4), value, np.float32)


def test_a_row_is_the_prompt_and_the_answer():
    row = make_row(prompt(5, media=2), media(2), [7, 8, 9], 16)
    assert row is not None
    assert row.prompt_len == 5
    assert row.ids.tolist() == [100, 101, 102, 103, 104, 7, 8, 9]
    assert row.media_idx.tolist() == [0, 1, -1, -1, -1, -1, -1, -1]
    # The answer goes on where a server puts it: index plus shift.
    assert row.positions[:, 5:].tolist() == [[2, 3, 4]] * 3


@pytest.mark.parametrize(
    ("row_length", "answer", "kept"),
    [(8, 3, 8), (7, 3, 7), (7, 2, 7), (6, 3, None), (4, 3, None), (16, 1, None), (16, 0, None)],
)
def test_long_rows_are_cut_and_rows_without_a_block_dropped(row_length, answer, kept):
    """A block needs an anchor and one label: two answer tokens."""
    row = make_row(prompt(5), media(0), list(range(answer)), row_length)
    assert (None if row is None else len(row.ids)) == kept


@pytest.mark.parametrize("name", ["demo", "demo-gemma4"])
def test_labels_are_the_answer_whatever_the_template_is(name):
    """D11: no chat template need say which tokens are the assistant's."""
    folder, _ = pair(name, "none")
    target, _ = load_target(folder, "float32")
    encoder = PromptEncoder.from_checkpoint(folder, target)
    request = Request(id="a", text="What does this chart show?", images=(), max_tokens=9)
    asked = encoder.encode(request)
    answer = [20, 21, 22, 23]
    row = make_row(asked, media(0), answer, 256)
    assert row is not None
    assert row.supervised == 3
    assert row.ids[row.prompt_len :].tolist() == answer


def test_a_row_whose_labels_all_weigh_nothing_is_dropped():
    silent = TokenWeights(np.zeros(3, np.float32), np.zeros(3, np.float32))
    assert make_row(prompt(5), media(0), [7, 8, 9], 16, silent) is None


def test_a_batch_is_padded_and_media_rows_are_stacked():
    rows = [
        make_row(prompt(5, media=2), media(2, 1.0), [7, 8], 10),
        make_row(prompt(3), media(0), [7, 8, 9], 10),
        make_row(prompt(4, media=3), media(3, 2.0), [7, 8], 10),
    ]
    batch = collate([row for row in rows if row is not None], 10)
    assert batch["ids"].shape == batch["media_idx"].shape == (3, 10)
    assert batch["positions"].shape == (3, 3, 10)
    assert batch["prompt_len"].tolist() == [5, 3, 4]
    assert batch["total_len"].tolist() == [7, 6, 6]
    assert batch["media_idx"][0].tolist() == [0, 1] + [-1] * 8
    assert batch["media_idx"][1].tolist() == [-1] * 10
    assert batch["media_idx"][2].tolist() == [2, 3, 4] + [-1] * 7
    assert batch["media"].shape == (64, 4)
    assert batch["media"][:6, 0].tolist() == [1, 1, 2, 2, 2, 0]
    assert batch["positions"][0, 0].tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 0, 0]


def test_a_batch_of_text_alone():
    row = make_row(prompt(3), media(0), [7, 8], 8)
    assert row is not None
    batch = collate([row, row], 8)
    assert (batch["media_idx"] == -1).all()
    assert batch["media"].shape == (64, 4)


def jsonl(tmp_path: Path, *lines: dict) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_last_lines_of_a_file_are_held_out(tmp_path):
    path = jsonl(tmp_path, *({"text": str(n)} for n in range(6)))
    learn, held_out = prompt_requests(FileData(path=path, held_out=3), 9, 2)
    assert [request.text for request in learn] == ["0", "1", "2"]
    # Fewer are decoded if the run asks for fewer; they are held out all the same.
    assert [request.text for request in held_out] == ["3", "4"]


def test_a_line_may_ask_for_fewer_tokens_than_the_run_and_not_for_more(tmp_path):
    path = jsonl(tmp_path, {"text": "a"}, {"text": "b", "max_tokens": 4},
                 {"text": "c", "max_tokens": 999_999})  # fmt: skip
    learn, _ = prompt_requests(FileData(path=path, held_out=0), 9, 2)
    assert [request.max_tokens for request in learn] == [9, 4, 9]


def test_rows_of_parquet_files_are_prompts_as_lines_are(tmp_path):
    for name, texts in (("a", ["0", "1"]), ("b", ["2"])):
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet")
    data = FileData(path=tmp_path, kind="parquet", held_out=1)
    sampling = SamplingSettings(temperature=0.5, seed=2)
    learn, held_out = prompt_requests(data, 9, 1, sampling)
    assert [request.text for request in learn] == ["0", "1"]
    assert [request.text for request in held_out] == ["2"]
    assert [request.sampling for request in learn] == [sampling.of_row(1), sampling.of_row(2)]
    place = places_of(data, learn + held_out)
    assert place(2) == f"{tmp_path / 'b.parquet'} row 1"
    names = sorted(tmp_path.iterdir())
    before = files_hash(names)
    pq.write_table(pa.table({"text": ["3"]}), tmp_path / "b.parquet")
    assert files_hash(names) != before
    assert files_hash(names[:1]) == hashlib.sha256(names[0].read_bytes()).hexdigest()


def test_bad_lines_stop_the_run_and_are_all_named(tmp_path):
    path = jsonl(tmp_path, {"text": "a"}, {"txt": "b"}, {"text": 3}, {"text": "c"})
    with pytest.raises(ConfigError) as error:
        prompt_requests(FileData(path=path, held_out=1), 9, 1)
    first, second = str(error.value).splitlines()
    assert first.startswith(f"{path}:2: unknown fields ['txt']")
    assert second.startswith(f"{path}:3: text is 3")


@pytest.mark.parametrize("held_out", [2, 5])
def test_nothing_left_to_learn_from(tmp_path, held_out):
    path = jsonl(tmp_path, {"text": "a"}, {"text": "b"})
    with pytest.raises(ConfigError, match=f"held_out is {held_out}, but .* holds 2 prompts"):
        prompt_requests(FileData(path=path, held_out=held_out), 9, 1)


def test_charts_for_training_and_for_evaluation_differ():
    learn, held_out = prompt_requests(ChartData(count=4, seed=5), 9, 3)
    assert (len(learn), len(held_out)) == (4, 3)
    assert all(len(request.images) == 1 and request.max_tokens == 9 for request in learn)
    again, _ = prompt_requests(ChartData(count=4, seed=5), 9, 3)
    assert [request.text for request in again] == [request.text for request in learn]
    sampled, _ = prompt_requests(
        ChartData(count=4, seed=5), 9, 3, SamplingSettings(temperature=1.0)
    )
    assert len({request.sampling.seed for request in sampled}) == 4
    assert {request.sampling.temperature for request in sampled} == {1.0}
    other, _ = prompt_requests(ChartData(count=4, seed=6), 9, 3)
    assert [request.text for request in other] != [request.text for request in learn]
