"""Answering with a fixed number in flight: ids of batches, counters that add up, one program."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.decode.slots import run
from mmflash_jax.drafters import NoDraft
from mmflash_jax.engine.offline import Completion, answer
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.evaluation import in_flight
from mmflash_jax.evaluation.acceptance import pooled_tau
from mmflash_jax.evaluation.in_flight import answer_in_flight, shape_for, warm_up
from mmflash_jax.load import load_target
from tests import tiny
from tests.decode import drafters
from tests.drafts import draft_for, random_params, two_layer_target

TEXTS = ("Hi", "What is on the left of this picture, please?", "Why?", "x", "Name a town.")


class Setup(NamedTuple):
    plan: Plan
    params: dict[str, Any]
    prompts: list[Prompt]
    expected: list[Completion]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """A tiny target with a random draft; one prompt ends with its first token."""
    folder = two_layer_target(tmp_path_factory.mktemp("target"))
    target, params = load_target(folder, "float32")
    drafter = draft_for(folder, block_size=4)
    encoder = PromptEncoder.from_checkpoint(folder, target)
    prompts = [
        encoder.encode(Request(text=text, max_tokens=limit))
        for text, limit in zip(TEXTS, (12, 1, 70, 12, 3), strict=True)
    ]
    params = {"target": params, "drafter": random_params(drafter)}
    plan = Plan(target, drafter, (tiny.TOKEN_IDS["<|im_end|>"],))
    return Setup(plan, params, prompts, answer(plan, params, prompts, batch=5).completions)


@pytest.fixture(autouse=True)
def _several_runs(monkeypatch: pytest.MonkeyPatch):
    """Answers take several runs of the loop."""
    monkeypatch.setattr(in_flight, "STEPS", 4)


def programs() -> int:
    return run._cache_size()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("slots", [1, 3])
def test_completions_are_those_of_batches(setup, slots):
    plan, params, prompts, expected = setup
    shape = shape_for(prompts, slots)
    assert shape.capacity >= max(len(p.ids) + p.max_tokens for p in prompts)
    warm_up(plan, params, prompts, shape)
    compiled = programs()
    seen: list[int] = []
    answers = answer_in_flight(plan, params, prompts, shape, seen.append)
    assert programs() == compiled, "the warm-up compiled the loop"
    assert seen == [1] * 5
    for got, wanted in zip(answers.completions, expected, strict=True):
        assert got.token_ids == wanted.token_ids
        assert got.finish_reason == wanted.finish_reason
        assert got.prompt_tokens == wanted.prompt_tokens
        assert got.steps == wanted.steps
        np.testing.assert_array_equal(got.committed, wanted.committed)
        np.testing.assert_array_equal(got.drafted, wanted.drafted)
    assert pooled_tau(answers.completions) == pooled_tau(expected)
    decoded = sum(len(c.token_ids) - 1 for c in expected)
    # With one slot nothing is filled in; with more, the fillers' tokens count too.
    assert answers.timing.tokens >= decoded
    assert (answers.timing.tokens == decoded) == (slots == 1)
    assert answers.timing.decode_s > 0


def test_every_timed_moment_has_all_in_flight(setup, monkeypatch):
    plan, params, prompts, _ = setup
    running = []

    def watched(plan, params, state, *rest, **options):
        # A row that ended on its way in has nothing left to decode.
        limits = np.asarray(state.limit)
        running.append(int((np.asarray(state.running) | (limits == 1)).sum()))
        return run(plan, params, state, *rest, **options)

    monkeypatch.setattr(in_flight, "run", watched)
    answer_in_flight(plan, params, prompts[:2], shape_for(prompts, 3))
    assert set(running) == {3}, "two prompts fill three slots"


def test_plain_decoding_goes_the_same_way(setup):
    plan, params, prompts, expected = setup
    plain = Plan(plan.target, NoDraft(), plan.stop_ids)
    answers = answer_in_flight(plain, params, prompts, shape_for(prompts, 3))
    assert [c.token_ids for c in answers.completions] == [c.token_ids for c in expected]
    assert pooled_tau(answers.completions) == 1.0


def test_any_drafter_goes_the_same_way(setup):
    """Even one that guesses at random and is of another kind."""
    plan, params, prompts, expected = setup
    guesses = drafters.random([[]] * 3)
    other = Plan(plan.target, drafters.Scripted(), plan.stop_ids)
    answers = answer_in_flight(other, params | {"drafter": guesses}, prompts, shape_for(prompts, 3))
    assert [c.token_ids for c in answers.completions] == [c.token_ids for c in expected]
    assert {len(c.committed) for c in answers.completions} == {8}
