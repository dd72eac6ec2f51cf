"""Answer prompts with a fixed number of them in flight, and time what decoding takes.

The state is that of the server (`decode.slots`): a row that ends makes room for the next prompt at
once, so `slots` requests decode in every timed moment. A batch that waits for its longest answer
(`engine.offline`) does not keep so many in flight and would flatter whatever ends early. After the
last prompt the first ones are asked again, until all have ended: these fillers count for the speed
alone. Prefill stands outside the clock; the host's part, between two runs of the loop, inside.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from mmflash_jax.decode.buckets import bucket
from mmflash_jax.decode.records import FINISH_REASONS, DecodeState, Plan, Prompt
from mmflash_jax.decode.slots import Emission, Pieces, Shape, empty_slots, insert, run
from mmflash_jax.engine.offline import Answers, Completion
from mmflash_jax.engine.planning import chunk_sizes
from mmflash_jax.engine.telling import to_host
from mmflash_jax.layers.schema import Params

STEPS = 32
"""Verify steps of a run at most; it ends before, when a row does."""
WARM_UP_TOKENS = 2 * STEPS


def shape_for(prompts: Sequence[Prompt], slots: int) -> Shape:
    """Sizes that hold every one of `prompts` with its answer."""
    longest, sizes = 0, set()
    # One after the other: they may be encoded while they are asked for.
    for prompt in prompts:
        longest = max(longest, len(prompt.ids) + prompt.max_tokens)
        sizes |= {bucket(len(image.patches), 64) for image in prompt.images}
    capacity = bucket(longest, 64)
    return Shape(
        slots=slots,
        capacity=capacity,
        steps=STEPS,
        widths=chunk_sizes(capacity),
        image_sizes=tuple(sorted(sizes)),
    )


def warm_up(plan: Plan, params: Params, prompts: Sequence[Prompt], shape: Shape) -> None:
    """Compile and run everything once, so that no clock sees it."""
    first = prompts[0]
    short = dataclasses.replace(first, max_tokens=min(first.max_tokens, WARM_UP_TOKENS))
    answer_in_flight(plan, params, [short], shape)


def answer_in_flight(
    plan: Plan,
    params: Params,
    prompts: Sequence[Prompt],
    shape: Shape,
    on_progress: Callable[[int], object] = lambda _: None,
) -> Answers:
    """Completions of `prompts` in their order, and the speed with `shape.slots` in flight.

    `on_progress` receives 1 for each prompt that is answered.

    Raises:
        ValueError: an image is larger than the sizes of `shape`.
    """
    pieces = Pieces.of(plan, params, shape)
    state = empty_slots(plan, shape)
    supply = itertools.count()
    slots: list[_Row | None] = [None] * shape.slots
    done: dict[int, Completion] = {}
    answers = Answers()
    while len(done) < len(prompts):
        for slot, held in enumerate(slots):
            if held is None:
                number = next(supply)
                prompt = prompts[number % len(prompts)]
                state = insert(plan, state, _prefilled(pieces, prompt), np.int32(slot))
                slots[slot] = _Row(number, len(prompt.ids))
        rows = [row for row in slots if row is not None]
        jax.block_until_ready(state)
        began = time.perf_counter()
        state, emission = run(
            plan, params, state,
            steps=shape.steps, rows=shape.slots, width=plan.drafter.block,
        )  # fmt: skip
        told = to_host(emission, logprobs=False)
        answers.timing.decode_s += time.perf_counter() - began
        for slot, row in enumerate(rows):
            answers.timing.tokens += row.gain(told, slot)
            if (completion := row.completion(told, slot)) is None:
                continue
            slots[slot] = None
            if row.number < len(prompts):
                done[row.number] = completion
                on_progress(1)
    answers.completions = [done[number] for number in range(len(prompts))]
    return answers


@dataclass
class _Row:
    """What a slot has told so far. number: of its prompt, going on past the last one."""

    number: int
    prompt_tokens: int
    ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)

    def gain(self, told: Emission, slot: int) -> int:
        """Take in a run's tokens; returns how many of them decoding made."""
        first = not self.ids
        new = int(told.num_tokens[slot]) - len(self.ids)
        self.ids += told.ids[slot, :new].tolist()
        self.drafted += told.drafted[slot, :new].tolist()
        # The first token of a row is prefill's work.
        return new - first

    def completion(self, told: Emission, slot: int) -> Completion | None:
        """The answer, once the row has ended."""
        reason = FINISH_REASONS.get(int(told.reason[slot]))
        if reason is None:
            return None
        return Completion(
            token_ids=tuple(self.ids),
            finish_reason=reason,
            prompt_tokens=self.prompt_tokens,
            steps=int(told.steps[slot]),
            committed=np.array(told.committed[slot]),
            drafted=np.array(self.drafted, bool),
        )


def _prefilled(pieces: Pieces, prompt: Prompt) -> DecodeState:
    rows = [row for _, row in pieces.prefill(prompt) if row is not None]
    return rows[-1]
