"""Answering a list of prompts, in batches and with the engine that serves."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest

from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.engine.backlog import answer_backlog, shape_for
from mmflash_jax.engine.offline import Completion, answer
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.load import load_target
from tests import tiny
from tests.drafts import draft_for, random_params, two_layer_target
from tests.targets.prompts import make_prompt

TEXTS = ("Hi", "What is on the left of this picture, please?", "Why?", "x", "Name a town.")


class Setup(NamedTuple):
    plan: Plan
    params: dict[str, Any]
    prompts: list[Prompt]


def programs() -> int:
    """Compiled variants of the decoding loop."""
    return decode._cache_size()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """A tiny target with a random draft and prompts of several lengths and limits."""
    folder = two_layer_target(tmp_path_factory.mktemp("target"))
    target, params = load_target(folder, "float32")
    drafter = draft_for(folder, block_size=4)
    encoder = PromptEncoder.from_checkpoint(folder, target)
    prompts = [
        encoder.encode(Request(text=text, max_tokens=limit))
        for text, limit in zip(TEXTS, (12, 1, 7, 12, 3), strict=True)
    ]
    params = {"target": params, "drafter": random_params(drafter)}
    return Setup(Plan(target, drafter, (tiny.TOKEN_IDS["<|im_end|>"],)), params, prompts)


@pytest.fixture(scope="module")
def whole(setup: Setup) -> list[Completion]:
    return answer(setup.plan, setup.params, setup.prompts, batch=5).completions


def test_completions_keep_the_order_of_the_prompts(setup, whole):
    assert [c.prompt_tokens for c in whole] == [len(p.ids) for p in setup.prompts]
    for completion, prompt in zip(whole, setup.prompts, strict=True):
        count = len(completion.token_ids)
        assert 1 <= count <= prompt.max_tokens
        assert (completion.finish_reason == "length") == (
            count == prompt.max_tokens and completion.token_ids[-1] not in setup.plan.stop_ids
        )
        # The prefill gives the first token, steps give the others.
        places = np.arange(1, len(completion.committed) + 1)
        assert (places * completion.committed).sum() == count - 1
        assert completion.committed.sum() == completion.steps
    assert whole[1].steps == 0


def test_the_last_batch_is_padded_and_progress_counts_prompts(setup, whole):
    seen: list[int] = []
    compiled = programs()
    answers = answer(setup.plan, setup.params, setup.prompts, batch=2, on_progress=seen.append)
    assert seen == [2, 2, 1]
    assert [c.token_ids for c in answers.completions] == [c.token_ids for c in whole]
    assert [c.steps for c in answers.completions] == [c.steps for c in whole]
    assert answers.timing.tokens == sum(len(c.token_ids) - 1 for c in whole)
    assert answers.timing.decode_s > 0
    assert programs() == compiled + 1, "three batches, one program"


def test_the_same_prompts_again_compile_nothing(setup, whole):
    compiled = programs()
    again = answer(setup.plan, setup.params, setup.prompts, batch=5)
    assert programs() == compiled
    assert [c.token_ids for c in again.completions] == [c.token_ids for c in whole]


def test_no_prompts(setup):
    answers = answer(setup.plan, setup.params, [], batch=4)
    assert answers.completions == []
    assert answers.timing.tokens_per_s == 0.0


def same(a, b):
    assert [one.token_ids for one in a] == [one.token_ids for one in b]
    assert [one.finish_reason for one in a] == [one.finish_reason for one in b]
    assert [one.steps for one in a] == [one.steps for one in b]
    for one, other in zip(a, b, strict=True):
        np.testing.assert_array_equal(one.committed, other.committed)
        np.testing.assert_array_equal(one.drafted, other.drafted)


def test_the_engine_gives_the_answers_of_batches_in_the_order_of_the_prompts(setup, whole):
    told: list[tuple[int, Completion]] = []

    def backlog(**options):
        told.clear()
        return answer_backlog(
            setup.plan, setup.params, setup.prompts, batch=2,
            on_answer=lambda *one: told.append(one), **options,
        )  # fmt: skip

    answers = backlog()
    same(answers.completions, whole)
    assert sorted(number for number, _ in told) == list(range(5)), "each once"
    assert all(answers.completions[number] is one for number, one in told)
    assert answers.timing.tokens == sum(len(one.token_ids) - 1 for one in whole)
    assert answers.timing.decode_s > 0

    again = backlog(known={number: answers.completions[number] for number in (0, 3)})
    same(again.completions, whole)
    assert sorted(number for number, _ in told) == [1, 2, 4]
    assert answer_backlog(setup.plan, setup.params, [], batch=2).completions == []


def test_a_prompt_that_fails_ends_the_run_with_its_number(setup):
    broken = dataclasses.replace(setup.prompts[1], positions=np.zeros((3, 0), np.int32))
    prompts = [setup.prompts[0], broken]
    with pytest.raises(RuntimeError, match="prompt 2: the prompt failed: ValueError"):
        answer_backlog(setup.plan, setup.params, prompts, batch=2)


def test_the_engine_is_sized_for_every_prompt_in_few_programs(setup):
    lengths = (5, 20, 31, 33, 200, 900)
    prompts = [make_prompt(setup.plan.target, n, seed=n, max_tokens=40) for n in lengths]
    shape = shape_for(prompts, 4)
    assert shape.slots == 4
    assert shape.capacity >= 940
    assert shape.widths == (48, 512)
    assert shape_for(prompts[:2], 4).slots == 2
    assert shape_for(prompts[:2], 4).widths == (32,)
