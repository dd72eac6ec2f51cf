"""Stop strings end the text exactly, however the tokens spell them (A04)."""

import json

import pytest
from transformers import AutoTokenizer

from mmflash_jax.config import ServeConfig
from mmflash_jax.engine.stops import cut_at_stop
from mmflash_jax.evaluation.batch import run
from mmflash_jax.registry import DEMO

TEXT = "Look: ABC is 72 and DEF is 81. Answer: 9</ans>more"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO / "qwen35")


@pytest.mark.parametrize("stop", ["</ans>", "</ans", "s 7", "DEF is 81. A", "Look"])
def test_text_ends_before_the_string_and_tokens_with_it(tokenizer, stop):
    ids = tokenizer(TEXT)["input_ids"]
    text, count, stopped = cut_at_stop(tokenizer.decode, ids, [stop])
    assert stopped
    assert text == TEXT[: TEXT.index(stop)]
    # The fewest tokens that spell it: one less and it is not there yet.
    assert stop in tokenizer.decode(ids[:count])
    assert stop not in tokenizer.decode(ids[: count - 1])


def test_a_string_of_several_tokens(tokenizer):
    """The case's own string takes at least three tokens, so it falls inside a block."""
    assert len(tokenizer("</ans")["input_ids"]) >= 3


def test_the_first_of_several_strings_ends_the_text(tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    assert (
        cut_at_stop(tokenizer.decode, ids, ["Answer", "DEF", "nowhere"])[0]
        == (TEXT[: TEXT.index("DEF")])
    )


@pytest.mark.parametrize("stops", [[], ["nowhere"]])
def test_without_a_match_nothing_is_cut(tokenizer, stops):
    ids = tokenizer(TEXT)["input_ids"]
    assert cut_at_stop(tokenizer.decode, ids, stops) == (TEXT, len(ids), False)


def test_the_tool_returns_and_counts_nothing_past_the_string(tmp_path):
    """The same prompt without and with a stop string from the middle of its answer."""
    sample = json.loads((DEMO / "samples" / "prompts.jsonl").read_text().splitlines()[0])
    request = {
        "text": sample["text"],
        "images": [str((DEMO / "samples" / name).resolve()) for name in sample["images"]],
        "max_tokens": 48,
    }
    answered = _answer(tmp_path, [request])[0]
    stop = answered["text"][20:26]
    assert answered["text"].index(stop) == 20
    free, ended = _answer(tmp_path, [request, {**request, "stop": ["nowhere", stop]}])
    assert free == {**answered, "id": "1"}
    assert ended["text"] == answered["text"][:20]
    assert ended["finish_reason"] == "stop"
    count = ended["usage"]["completion_tokens"]
    assert ended["token_ids"] == answered["token_ids"][:count]
    assert 0 < count < len(answered["token_ids"])


@pytest.mark.parametrize("stop", ["word", [""], [7]])
def test_a_stop_that_is_no_list_of_strings_is_refused(tmp_path, stop):
    code = _run(tmp_path, [{"text": "hello", "stop": stop}])
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert code == 1
    assert "prompts.jsonl:1: stop" in row["error"]


def _run(folder, requests):
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return run(ServeConfig(prompts=prompts, output=folder / "out.jsonl", plain=False))


def _answer(folder, requests):
    assert _run(folder, requests) == 0
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
