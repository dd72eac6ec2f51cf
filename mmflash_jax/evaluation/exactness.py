"""Are drafted ids those of plain decoding? If not, is every difference a numeric tie?

A block pass and a one-token pass sum in different orders, so in bf16 a near-tie between the two
best tokens can fall either way (docs/exactness.md). A difference is explained only if both ids have
logits there, recomputed in fp32, within `TIE` of the logits' scale of the best one; the gap of the
two best is then no wider.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.decode.buckets import bucket, chunk_widths
from mmflash_jax.decode.prefill import CHUNK, encode_media, extend, prefill_chunk, run_chunks
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.decode.sampling import gather, scores
from mmflash_jax.drafters import NoDraft
from mmflash_jax.engine.offline import Completion
from mmflash_jax.layers.schema import Params

# Of the largest logit. bf16 keeps 8 bits, and a few layers of it move a logit by about 2^-6.
TIE = {"float32": 1e-5, "bfloat16": 2.0**-6}
AT_ONCE = 16
"""Differences that are examined at the same time."""


@dataclass(frozen=True)
class Divergence:
    """The first token at which a drafted answer left the plain one.

    gap: how far the lower of the two ids' fp32 logits is under the best one, as a share of the
        largest magnitude; None where one of the answers has ended.
    """

    row: int
    place: int
    gap: float | None
    explained: bool


@dataclass(frozen=True)
class Parity:
    """Comparison of two runs over the same prompts."""

    equal: tuple[bool, ...]
    divergences: tuple[Divergence, ...]

    @property
    def holds(self) -> bool:
        """Every row equal, or different only at a numeric tie."""
        return all(divergence.explained for divergence in self.divergences)


@dataclass(frozen=True)
class Fork:
    """Where two answers part: the prompt with what they share, the place of the next token in the
    answer, and both ids for it."""

    known: Prompt
    place: int
    ids: list[int]


def compare(
    plan: Plan,
    params: Params,
    prompts: Sequence[Prompt],
    drafted: Sequence[Completion],
    plain: Sequence[Completion],
) -> Parity:
    """Compare ids row by row; differences are examined in fp32."""
    equal = tuple(a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True))
    places = {
        row: _first_difference(drafted[row].token_ids, plain[row].token_ids)
        for row, same in enumerate(equal)
        if not same
    }
    forks = {row: _fork(prompts[row], drafted[row], plain[row], places[row]) for row in places}
    # Answers that differ in length alone have one id here, which is no tie.
    forks = {row: fork for row, fork in forks.items() if len(fork.ids) == 2}
    gaps = dict(zip(forks, _gaps(plan, params, list(forks.values())), strict=True))
    tie = TIE[plan.target.dtype]
    divergences = (
        Divergence(row, place, gaps.get(row), row in gaps and gaps[row] <= tie)
        for row, place in places.items()
    )
    return Parity(equal, tuple(divergences))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    different = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(different, min(len(a), len(b)))


def _fork(prompt: Prompt, drafted: Completion, plain: Completion, place: int) -> Fork:
    ids = [id for answer in (drafted, plain) for id in answer.token_ids[place:][:1]]
    return Fork(extend(prompt, plain.token_ids[:place]), place, ids)


def _gaps(plan: Plan, params: Params, forks: Sequence[Fork]) -> list[float]:
    """Distance of the lower of a fork's ids to the best id there, `AT_ONCE` forks at a time."""
    if not forks:
        return []
    target = dataclasses.replace(plan.target, dtype="float32")  # pyright: ignore[reportArgumentType]
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params["target"])
    exact = dataclasses.replace(plan, target=target, drafter=NoDraft())
    # One size of everything, the last fork again and again: one program.
    longest = max(len(fork.known.ids) for fork in forks)
    widths = chunk_widths(longest, widest=CHUNK)
    rows = 1 if len(forks) == 1 else AT_ONCE
    gaps: list[float] = []
    for start in range(0, len(forks), rows):
        part = forks[start : start + rows]
        filled = [*part, *[part[-1]] * (rows - len(part))]
        prompts = [fork.known for fork in filled]
        state = run_chunks(
            exact, {"target": wide, "drafter": {}}, prompts, encode_media(plan, params, prompts),
            widths, capacity=bucket(longest, 64), run=_prefill_untuned,
        )  # fmt: skip
        logits = plan.tokens_only(target.logits(wide, state.last))[: len(part), None]
        place = np.array([[fork.place] for fork in part], np.int32)
        # A sampled token is the largest of logits and noise; ids that a filter left out are -inf.
        sampling = gather([fork.known.sampling for fork in part])
        compared = np.asarray(scores(logits, sampling, jnp.asarray(place)))[:, 0]
        gaps += [_gap(row, fork.ids) for row, fork in zip(compared, part, strict=True)]
    return gaps


# Trying out tiles for products in full fp32 took most of a minute a program on an H200.
_prefill_untuned = jax.jit(
    prefill_chunk.__wrapped__,  # type: ignore[attr-defined]
    static_argnames="plan",
    donate_argnames="state",
    compiler_options={"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
)


def _gap(compared: np.ndarray, ids: Sequence[int]) -> float:
    scale = np.abs(compared[np.isfinite(compared)]).max()
    return float((compared.max() - compared[list(ids)].min()) / scale)
