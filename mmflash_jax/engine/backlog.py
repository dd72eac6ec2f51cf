"""Answer a list of prompts with the engine that serves: a row that ends makes room for the next."""

import queue
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mmflash_jax.decode.buckets import bucket
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.decode.slots import Shape
from mmflash_jax.engine.offline import Answers, Completion
from mmflash_jax.engine.serving import Engine
from mmflash_jax.engine.tickets import Update
from mmflash_jax.layers.schema import Params

STEPS = 32
"""Verify steps of a run at most; it ends before, when a row does. No stream waits for it."""
ALL_FREE_ROWS = 2**30
"""Prompt tokens between two runs: rows that are free are all filled before the others go on."""


def shape_for(prompts: Sequence[Prompt], slots: int) -> Shape:
    """Sizes that hold each of `prompts` with its answer, in few programs."""
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    widest = Shape.widths[-1]
    # One width for the shorter half, one for the others.
    widths = {min(bucket(n, 32), widest) for n in (lengths[len(lengths) // 2], lengths[-1])}
    sizes = {bucket(len(image.patches), 64) for prompt in prompts for image in prompt.images}
    return Shape(
        slots=min(slots, len(prompts)),
        capacity=bucket(max(len(prompt.ids) + prompt.max_tokens for prompt in prompts), 64),
        steps=STEPS,
        widths=tuple(sorted(widths)),
        image_sizes=tuple(sorted(sizes)),
    )


def answer_backlog(
    plan: Plan,
    params: Params,
    prompts: Sequence[Prompt],
    *,
    batch: int,
    known: Mapping[int, Completion] | None = None,
    on_answer: Callable[[int, Completion], object] = lambda *_: None,
) -> Answers:
    """Completions in the order of the prompts, up to `batch` of them decoding at any time.

    known: answers by number that an earlier run has made; they have no part in the speed.
    on_answer: receives the number of a prompt and its answer as soon as it has ended.

    Raises:
        RuntimeError: the engine or a prompt failed.
    """
    done = dict(known or {})
    open_numbers = [number for number in range(len(prompts)) if number not in done]
    if not open_numbers:
        return Answers([done[number] for number in range(len(prompts))])
    # The prompts that are known count for the sizes: a run that goes on where another stopped
    # answers as that one would have.
    shape = shape_for(prompts, batch)
    engine = Engine(plan, params, shape, queue=len(prompts), prefill=ALL_FREE_ROWS)
    engine.warm_up(next((image for prompt in prompts for image in prompt.images), None))
    ended: queue.SimpleQueue[_Growing] = queue.SimpleQueue()
    for number in open_numbers:
        engine.submit(prompts[number], _Growing(number, len(prompts[number].ids), ended))
    engine.start()
    try:
        for _ in open_numbers:
            one = ended.get()
            done[one.number] = one.completion()
            on_answer(one.number, done[one.number])
    except RuntimeError as error:
        raise error from engine.failure
    finally:
        engine.stop()
    return Answers([done[number] for number in range(len(prompts))], engine.timing)


class _Growing:
    """An answer on its way: receives the updates of its request."""

    def __init__(self, number: int, prompt_tokens: int, ended: "queue.SimpleQueue[_Growing]"):
        self.number = number
        self._prompt_tokens, self._ended = prompt_tokens, ended
        self._ids: list[int] = []
        self._drafted: list[bool] = []
        self._last = Update()

    def __call__(self, update: Update) -> None:
        self._ids += update.ids
        self._drafted += update.drafted
        self._last = update
        if update.finish_reason is not None:
            self._ended.put(self)

    def completion(self) -> Completion:
        last = self._last
        if last.error is not None or last.finish_reason is None:
            raise RuntimeError(f"prompt {self.number + 1}: {last.error}")
        return Completion(
            token_ids=tuple(self._ids),
            finish_reason=last.finish_reason,
            prompt_tokens=self._prompt_tokens,
            steps=last.steps,
            committed=np.array(last.committed, np.int32),
            drafted=np.array(self._drafted, bool),
        )
