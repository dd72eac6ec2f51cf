"""Running batches to their end, at once or step by step with every invariant checked."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.prefill import prefill
from mmflash_jax.decode.records import ABSENT, LENGTH, RUNNING, STOP, DecodeState, Plan, Prompt
from mmflash_jax.decode.slots import Pieces, Shape, empty_slots, insert, run
from mmflash_jax.decode.step import propose, step
from tests.decode.drafters import Seen
from tests.targets.meaning import assert_same_meaning, logical

CAPACITY, CHUNK = 128, 32
Prompts = Sequence[Prompt | None]
one_step = jax.jit(step, static_argnames="plan")


def generate(
    plan: Plan, params: Any, prompts: Prompts, *, capacity: int = CAPACITY, chunk: int = CHUNK
) -> DecodeState:
    """The state after the fused loop has ended every row."""
    start = prefill(plan, params, prompts, capacity=capacity, chunk=chunk)
    return decode(plan, params, start, 10**6)


def answers(state: DecodeState) -> list[list[int]]:
    """Generated ids of each row."""
    tokens, count = np.asarray(state.tokens), np.asarray(state.num_tokens)
    return [row[:n].tolist() for row, n in zip(tokens, count, strict=True)]


def walk(
    plan: Plan, params: Any, prompts: Prompts, *, capacity: int = CAPACITY, chunk: int = CHUNK
) -> list[DecodeState]:
    """Every state from the prompt to the end; the invariants hold in each."""
    states = [prefill(plan, params, prompts, capacity=capacity, chunk=chunk)]
    check(plan, prompts, states[0])
    while np.any(states[-1].running):
        states.append(one_step(plan, params, states[-1]))
        check(plan, prompts, states[-1])
        check_step(plan, params, states[-2], states[-1])
    return states


def check(plan: Plan, prompts: Prompts, state: DecodeState) -> None:
    """What the docstring of `DecodeState` promises of one state."""
    fields = {name: np.asarray(getattr(state, name)) for name in _SMALL}
    weights = np.arange(1, plan.drafter.block + 1)
    for row, prompt in enumerate(prompts):
        of = {name: value[row] for name, value in fields.items()}
        count, reason = of["num_tokens"], of["reason"]
        if prompt is None:
            assert reason == ABSENT
            assert count == of["steps"] == of["length"] == of["committed"].sum() == 0
            continue
        ids = of["tokens"][:count].tolist()
        assert of["length"] + 1 == len(prompt.ids) + count
        assert of["anchor"] == ids[-1]
        assert of["limit"] == prompt.max_tokens
        assert of["rope_shift"] == prompt.rope_shift
        assert 1 <= count <= prompt.max_tokens
        assert not (set(ids[:-1]) & set(plan.stop_ids)), "tokens after a stop"
        if ids[-1] in plan.stop_ids:
            assert reason == STOP
        else:
            assert reason == (LENGTH if count == prompt.max_tokens else RUNNING)
        assert of["committed"].sum() == of["steps"]
        assert of["committed"] @ weights == count - 1, "the first token is of no step"
        drafted = of["drafted"]
        assert not drafted[0]
        assert not drafted[count:].any()
        # Every step ends with the target's own token, if the answer does not end before.
        assert of["steps"] == (~drafted[1:count]).sum() + drafted[count - 1]
        if isinstance(state.draft, Seen):
            # The draft's context is exactly the known tokens but the anchor, each taken in once.
            wanted = np.arange(state.draft.writes.shape[1]) < of["length"]
            np.testing.assert_array_equal(state.draft.writes[row], wanted)


def check_step(plan: Plan, params: Any, before: DecodeState, after: DecodeState) -> None:
    """Running rows advance by 1 .. block tokens, the others stay as they are."""
    running = np.asarray(before.running)
    gained = np.asarray(after.num_tokens) - np.asarray(before.num_tokens)
    assert (gained[running] >= 1).all()
    assert (gained[running] <= plan.drafter.block).all()
    for name in _SMALL:
        old, new = np.asarray(getattr(before, name)), np.asarray(getattr(after, name))
        np.testing.assert_array_equal(new[~running], old[~running], err_msg=name)
    if not running.all():
        old, new = meaning(plan, params, before), meaning(plan, params, after)
        for row in np.flatnonzero(~running):
            assert_same_meaning(new[row], old[row], f"cache of ended row {row}")


def meaning(plan: Plan, params: Any, state: DecodeState) -> list[list[np.ndarray]]:
    """Per row, what the target's cache means."""
    return logical(plan.target, params["target"], state.cache, np.asarray(state.length))


@functools.partial(jax.jit, static_argnames="plan")
def proposals(plan: Plan, params: Any, state: DecodeState) -> Any:
    """Ids that the drafter would propose now."""
    return propose(plan, params, state).ids


_SMALL = (
    "tokens", "num_tokens", "limit", "anchor", "length", "rope_shift", "reason", "steps",
    "committed", "drafted",
)  # fmt: skip


def assert_state_moves_into_a_slot(plan: Plan, params: Any, prompts: Sequence[Prompt]) -> None:
    """After `insert` and narrow runs rows stand and draft as rows that were prefilled together."""
    shape = Shape(slots=3, capacity=CAPACITY, widths=(CHUNK,), image_sizes=(64,))
    pieces, state = Pieces.of(plan, params, shape), empty_slots(plan, shape)
    placed = {2: 3, 0: 1}
    for slot, number in placed.items():
        *_, (_, row) = pieces.prefill(prompts[number])
        state = insert(plan, state, row, np.int32(slot))
    together = [prompts[number] for number in placed.values()]
    alone = prefill(plan, params, together, capacity=CAPACITY, chunk=CHUNK)

    def agree() -> None:
        for name in ("anchor", "num_tokens"):
            got, wanted = (np.asarray(getattr(one, name)) for one in (state, alone))
            np.testing.assert_array_equal(got[list(placed)], wanted, err_msg=name)
        drafted = np.asarray(proposals(plan, params, state))[list(placed)]
        np.testing.assert_array_equal(drafted, proposals(plan, params, alone))

    agree()
    state, _ = run(plan, params, state, steps=2, rows=3, width=3)
    alone = one_step(plan, params, one_step(plan, params, alone))
    agree()
