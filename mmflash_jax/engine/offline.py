"""Answer a list of prompts in batches and measure it. Host side only."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from mmflash_jax.decode.buckets import bucket
from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.prefill import prefill
from mmflash_jax.decode.records import FINISH_REASONS, DecodeState, Plan, Prompt
from mmflash_jax.engine.stops import cut_at_stop
from mmflash_jax.layers.schema import Params

MORE_THAN_ANY_ROW = np.int32(2**30)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer.

    token_ids: generated ids, a stop token included; `until_stop` cuts them at a stop string.
    finish_reason: "stop" or "length".
    steps: verify steps, the prefill's token takes none.
    committed: int `[block]`, steps that committed index + 1 tokens.
    drafted: bool `[T]`, which of the decoded tokens are accepted drafts.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    steps: int
    committed: np.ndarray
    drafted: np.ndarray

    @property
    def tau(self) -> float | None:
        """Tokens committed per verify step, bonus included; None if no step was needed."""
        committed = int(self.committed @ (1 + np.arange(len(self.committed))))
        return committed / self.steps if self.steps else None


@dataclass
class Timing:
    """Seconds of decoding, without prefill and compilation, and the tokens they gave."""

    decode_s: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.decode_s if self.decode_s else 0.0


@dataclass
class Answers:
    """Completions in the order of the prompts, and how long they took."""

    completions: list[Completion] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)


def answer(
    plan: Plan,
    params: Params,
    prompts: Sequence[Prompt],
    *,
    batch: int,
    start: int = 0,
    on_progress: Callable[[int], object] = lambda _: None,
    on_batch: Callable[[Sequence[Completion]], object] = lambda _: None,
) -> Answers:
    """Decode all prompts from number `start` on, `batch` at a time.

    All batches share the sizes of cache and answers, so the loop compiles once. The prompts before
    `start` count for the sizes: a run that goes on where another stopped, at the beginning of a
    batch, answers exactly as that one would have. `on_progress` receives the number of prompts
    answered since the last call, `on_batch` their completions.
    """
    answers = Answers()
    if not prompts:
        return answers
    rows = min(batch, len(prompts))
    capacity = bucket(max(len(p.ids) + p.max_tokens for p in prompts), 64)
    room = bucket(max(p.max_tokens for p in prompts), 16)
    for at in range(start, len(prompts), rows):
        part = list(prompts[at : at + rows])
        padded = part + [None] * (rows - len(part))
        state = prefill(plan, params, padded, capacity=capacity, room=room)
        # No steps: compiles the loop, so that the clock below sees decoding only.
        state = jax.block_until_ready(decode(plan, params, state, np.int32(0)))
        began = time.perf_counter()
        state = jax.block_until_ready(decode(plan, params, state, MORE_THAN_ANY_ROW))
        answers.timing.decode_s += time.perf_counter() - began
        done = _completions(part, state)
        # The first token of a row is prefill's work.
        answers.timing.tokens += sum(len(completion.token_ids) - 1 for completion in done)
        answers.completions += done
        on_batch(done)
        on_progress(len(part))
    return answers


def until_stop(
    decode: Callable[[Sequence[int]], str], completion: Completion, stops: Sequence[str]
) -> tuple[str, Completion]:
    """Text and completion up to the first stop string; its counters keep what was decoded."""
    text, count, stopped = cut_at_stop(decode, completion.token_ids, stops)
    if not stopped:
        return text, completion
    kept = completion.token_ids[:count]
    return text, dataclasses.replace(completion, token_ids=kept, finish_reason="stop")


def _completions(prompts: Sequence[Prompt], state: DecodeState) -> list[Completion]:
    tokens, counts, reasons, steps, committed, drafted = (
        np.asarray(x)
        for x in jax.device_get(
            (
                state.tokens, state.num_tokens, state.reason, state.steps, state.committed,
                state.drafted,
            )
        )
    )  # fmt: skip
    return [
        Completion(
            token_ids=tuple(int(id) for id in tokens[row, : counts[row]]),
            finish_reason=FINISH_REASONS[int(reasons[row])],
            prompt_tokens=len(prompt.ids),
            steps=int(steps[row]),
            committed=committed[row],
            drafted=drafted[row, : counts[row]],
        )
        for row, prompt in enumerate(prompts)
    ]
