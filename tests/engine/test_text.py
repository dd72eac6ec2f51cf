"""Streamed text: whole characters only, nothing of a stop string, the same text as at once."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from mmflash_jax.engine.stops import cut_at_stop
from mmflash_jax.engine.text import BROKEN, AnswerText, TokenText
from mmflash_jax.registry import DEMO

HARD = "삼겹살 👩‍👩‍👧 ďábelské ∑ plain <a> 😀😀"


@pytest.fixture(scope="module", params=["qwen35", "gemma4"])
def tokenizer(request):
    return AutoTokenizer.from_pretrained(DEMO / request.param)


def pieces(ids, seed, most=5):
    """The ids in random parts, as runs of the loop bring them."""
    random, at = np.random.default_rng(seed), 0
    while at < len(ids):
        count = int(random.integers(1, most + 1))
        yield ids[at : at + count]
        at += count


@pytest.mark.parametrize("seed", range(8))
def test_characters_are_never_shown_in_part(tokenizer, seed):
    """C10: deltas add up to the whole text, without a replacement character."""
    ids = tokenizer(HARD * 3, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == HARD * 3
    stream = TokenText(tokenizer.decode)
    deltas = [stream.push(part) for part in pieces(ids, seed)]
    assert BROKEN not in "".join(deltas)
    assert "".join(deltas) + stream.rest() == HARD * 3


def test_an_answer_that_ends_inside_a_character_is_flushed(tokenizer):
    ids = tokenizer("ok 😀", add_special_tokens=False)["input_ids"][:-1]
    answer = AnswerText(tokenizer.decode)
    shown = answer.push(ids[:2]) + answer.push(ids[2:])
    assert BROKEN not in shown
    shown += answer.push([], last=True)
    assert shown == tokenizer.decode(ids) == answer.text
    assert shown.endswith(BROKEN)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "stops", [["</ans"], ["s 7", "DEF is"], ["DEF is 81. Answer", "is 8"], ["nowhere", "9<x"], []]
)
def test_stop_strings_never_show_whatever_the_parts(tokenizer, stops, seed):
    """A04: text, tokens and end are those of the whole answer cut at once."""
    ids = tokenizer(
        "Look: ABC is 72 and DEF is 81. Answer: 9</ans>more 9<", add_special_tokens=False
    )
    ids = ids["input_ids"]
    text, count, stopped = cut_at_stop(tokenizer.decode, ids, stops)
    answer, shown = AnswerText(tokenizer.decode, stops=stops), ""
    parts = list(pieces(ids, seed))
    for index, part in enumerate(parts):
        shown += answer.push(part, last=index == len(parts) - 1)
        assert text.startswith(shown)
        if answer.ended:
            break
    assert shown == answer.text == text
    assert (len(answer.ids), answer.ended) == (count, stopped)


def test_a_stop_id_ends_the_answer_inside_a_block(tokenizer):
    """A01, A02: nothing after the stop token, though it stood in mid-block."""
    ids = tokenizer("ABC is 72 and more", add_special_tokens=False)["input_ids"]
    answer = AnswerText(tokenizer.decode, stop_ids=[ids[3]])
    assert answer.push(ids) == tokenizer.decode(ids[:4])
    assert answer.ended
    assert answer.ids == ids[:4]


def test_text_comes_as_soon_as_it_can(tokenizer):
    ids = tokenizer("and so on", add_special_tokens=False)["input_ids"]
    answer = AnswerText(tokenizer.decode, stops=["!!"])
    assert "".join(answer.push([id]) for id in ids) == "and so on"
