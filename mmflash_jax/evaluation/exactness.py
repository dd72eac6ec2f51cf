"""Are drafted ids those of plain decoding? If not, is every difference a numeric tie?

A block pass and a one-token pass sum in different orders, so in bf16 a near-tie between the two
best tokens can fall either way (docs/exactness.md). A difference is explained only if both ids have
logits there, recomputed in fp32, within `TIE` of the logits' scale of the best one; the gap of the
two best is then no wider.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.decode.buckets import bucket
from mmflash_jax.decode.prefill import extend, run_prompts
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.decode.sampling import gather, scores
from mmflash_jax.drafters import NoDraft
from mmflash_jax.engine.offline import Completion
from mmflash_jax.layers.schema import Params

# Of the largest logit. bf16 keeps 8 bits, and a few layers of it move a logit by about 2^-6.
TIE = {"float32": 1e-5, "bfloat16": 2.0**-6}


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


def compare(
    plan: Plan,
    params: Params,
    prompts: Sequence[Prompt],
    drafted: Sequence[Completion],
    plain: Sequence[Completion],
) -> Parity:
    """Compare ids row by row; differences are examined in fp32."""
    wide = _in_fp32(plan, params)
    equal = tuple(a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True))
    divergences = []
    for row, same in enumerate(equal):
        if same:
            continue
        place = _first_difference(drafted[row].token_ids, plain[row].token_ids)
        here = [*drafted[row].token_ids[place:][:1], *plain[row].token_ids[place:][:1]]
        known = plain[row].token_ids[:place]
        # Answers that differ in length alone have one id here, which is no tie.
        gap = _gap(*wide(), prompts[row], known, here) if len(here) == 2 else None
        explained = gap is not None and gap <= TIE[plan.target.dtype]
        divergences.append(Divergence(row, place, gap, explained))
    return Parity(equal, tuple(divergences))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    different = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(different, min(len(a), len(b)))


def _in_fp32(plan: Plan, params: Params) -> Callable[[], tuple[Plan, dict[str, Params]]]:
    """Plain decoding in fp32, made when it is first asked for: most comparisons find no gap."""

    @functools.cache
    def make() -> tuple[Plan, dict[str, Params]]:
        target = dataclasses.replace(plan.target, dtype="float32")  # pyright: ignore[reportArgumentType]
        cast = jax.tree.map(lambda x: x.astype(jnp.float32), params["target"])
        plain = dataclasses.replace(plan, target=target, drafter=NoDraft())
        return plain, {"target": cast, "drafter": {}}

    return make


def _gap(
    plain: Plan, params: dict[str, Params], prompt: Prompt, known: Sequence[int], ids: Sequence[int]
) -> float:
    """Distance of the lowest of `ids` to the best id after the prompt and `known` tokens."""
    longer = extend(prompt, known)
    state = run_prompts(plain, params, [longer], capacity=bucket(len(longer.ids), 64))
    logits = plain.tokens_only(plain.target.logits(params["target"], state.last))[:, None]
    place = jnp.full((1, 1), len(known), jnp.int32)
    # A sampled token is the largest of logits and noise; ids that a filter left out are -inf.
    compared = np.asarray(scores(logits, gather([prompt.sampling]), place))[0, 0]
    scale = np.abs(compared[np.isfinite(compared)]).max()
    return float((compared.max() - compared[list(ids)].min()) / scale)
