"""Target passes over batches of ragged prompts, with junk wherever nothing real stands."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.decode.prefill import encode_media, pad_prompts
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.drafters import NoDraft
from mmflash_jax.targets import Target
from pallas_kernels import ancestors_of, depths_of


class Passed(NamedTuple):
    """logits and features of each row's real tokens, and the cache after them."""

    logits: list[np.ndarray]
    features: list[np.ndarray]
    cache: Any


def every_layer(target: Target) -> tuple[int, ...]:
    return tuple(range(target.config.num_hidden_layers))


@functools.partial(jax.jit, static_argnames=("target", "capture", "decided"))
def one_pass(
    target: Target, params: Any, ids: Any, media: Any, media_idx: Any, positions: Any, cache: Any,
    length: Any, count: Any, parents: Any = None, *, capture: tuple[int, ...], decided: bool,
) -> Any:  # fmt: skip
    """Logits, features and cache of one pass whose padded embeddings are large junk."""
    x = target.embed(params, ids, media, media_idx)
    real = jnp.arange(ids.shape[1]) < count[:, None]
    x = jax.tree.map(
        lambda part: jnp.where(
            real.reshape(*real.shape, *[1] * (part.ndim - 2)), part, 50.0 + 9.0 * part
        ),
        x,
    )
    run = target.prefill if decided else functools.partial(target.forward, parents=parents)
    out = run(params, x, positions, cache, length, count, capture=capture)
    return target.logits(params, out.hidden), out.features, out.cache


commit = jax.jit(
    lambda target, cache, keep, path=None: target.commit(cache, keep, path), static_argnums=0
)


def prefill(
    target: Target, params: Any, prompts: Sequence[Prompt], widths: Sequence[int], *,
    capacity: int, block: int = 16, capture: tuple[int, ...] | None = None,
) -> Passed:  # fmt: skip
    """Prompts through `prefill` in chunks of `widths`."""
    plan = Plan(target, NoDraft(), ())
    media, first_row = encode_media(plan, {"target": params}, prompts)
    ids, media_idx, positions = pad_prompts(plan, prompts, first_row, sum(widths))
    lengths = np.array([len(prompt.ids) for prompt in prompts], np.int32)
    padded = np.arange(sum(widths)) >= lengths[:, None]
    ids[padded], positions[:, padded] = 77, 900
    cache = target.init_cache(len(prompts), capacity, block)
    logits, features, start = [], [], 0
    for width in widths:
        here = slice(start, start + width)
        one, two, cache = one_pass(
            target, params, ids[:, here], media, media_idx[:, here], positions[:, :, here], cache,
            np.minimum(lengths, start), np.clip(lengths - start, 0, width),
            capture=every_layer(target) if capture is None else capture, decided=True,
        )  # fmt: skip
        logits.append(np.asarray(one))
        features.append(np.asarray(two))
        start += width
    logits, features = np.concatenate(logits, 1), np.concatenate(features, 1)
    rows = [slice(0, length) for length in lengths]
    return Passed(
        [logits[i, row] for i, row in enumerate(rows)],
        [features[i, row] for i, row in enumerate(rows)],
        cache,
    )


def block_pass(
    target: Target, params: Any, ids: np.ndarray, cache: Any, length: np.ndarray,
    shift: np.ndarray, *, parents: np.ndarray | None = None, capture: tuple[int, ...] = (),
) -> tuple[np.ndarray, np.ndarray, Any]:  # fmt: skip
    """A drafted block `[B, T]`, chain or tree, at `length`: logits, features, uncommitted cache."""
    after = np.arange(ids.shape[1])
    if parents is not None:
        after = np.asarray(depths_of(ancestors_of(jnp.asarray(parents))))
    index = length[:, None] + after + shift[:, None]
    positions = np.broadcast_to(index, (target.position_axes, *index.shape)).astype(np.int32)
    count = np.full(len(ids), ids.shape[1], np.int32)
    logits, features, cache = one_pass(
        target, params, ids.astype(np.int32), None, None, positions, cache,
        length.astype(np.int32), count, parents, capture=capture, decided=False,
    )  # fmt: skip
    return np.asarray(logits), np.asarray(features), cache
