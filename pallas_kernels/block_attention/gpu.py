"""Block attention as a Pallas kernel for NVIDIA GPUs (Triton backend).

A program takes one key/value head of one batch row, a tile of its query rows (`T x G` of them:
the G query heads of a group are rows of one product) and a share of the context. Several programs
share a context ("splits", Dao et al., Flash-Decoding); a second kernel merges their results, in
fp32. Reading follows the length of each row, not the capacity of the cache.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.choose import PROCESSORS

# Finite, so that a split without keys never produces NaN through inf - inf.
NOTHING = -1e30
MOST_SPLITS = 64
# The smallest side of a tensor-core product.
LEAST = 16


@dataclass(frozen=True)
class Tile:
    """Work of a program: query rows, keys at a time, programs that share a context."""

    rows: int
    keys: int
    splits: int
    warps: int
    stages: int


def obstacle(q: Array, cache: Array, ring: bool) -> str | None:
    """Why the kernel cannot take these arguments."""
    width = q.shape[-1]
    if width < LEAST or width & (width - 1):
        return f"head width {width} is no power of two from {LEAST} on"
    if q.dtype != cache.dtype:
        return f"queries are {q.dtype}, the cache is {cache.dtype}"
    keys = _tile(q, cache, None).keys
    if ring and cache.shape[2] < keys:
        return f"a ring of {cache.shape[2]} slots is smaller than a tile of {keys} keys"
    return None


def _power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << max(count - 1, 0).bit_length()


def _tile(q: Array, cache: Array, window: int | None) -> Tile:
    """Tiles that neither spill registers nor exceed shared memory on an H200."""
    B, T, N, H = q.shape
    K, S = cache.shape[1:3]
    context = S if window is None else min(S, window)
    if q.dtype.itemsize == 4:
        # fp32 products use no tensor cores: small tiles, or registers spill.
        rows, keys, warps, stages = LEAST, LEAST, 4, 1
    else:
        rows = min(max(LEAST, _power_of_two(T * (N // K))), 64)
        if rows > LEAST and H > 128:
            # Of wide heads 32 rows spill (144 bytes a thread at width 256, 1188 at 512), 64 do not.
            rows = 64
        keys = 64 if H <= 256 else 32
        if B * K * pl.cdiv(T * (N // K), rows) * pl.cdiv(context, keys) <= PROCESSORS // 4:
            # Most processors would stay idle: keys are read more than once then, from the cache.
            rows = LEAST
        warps = 8 if H > 256 and rows > LEAST else 4
        stages = 3 if H <= 128 else 2
    programs = B * K * pl.cdiv(T * (N // K), rows)
    # Programs with many query rows fill a processor, two with few share one.
    room = PROCESSORS if rows > LEAST else 2 * PROCESSORS
    tiles = pl.cdiv(context, keys)
    wanted = min(room // programs, tiles, MOST_SPLITS)
    splits = 1 << (max(wanted, 1).bit_length() - 1)
    if splits == tiles and 2 * splits <= min(room // programs, LEAST):
        # One more for the block's own keys.
        splits *= 2
    return Tile(rows=rows, keys=keys, splits=splits, warps=warps, stages=stages)


def _dot(a: Array, b: Array) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, precision=precision)


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """Which keys a query sees; `scale` is in units of log 2."""

    T: int
    G: int
    scale: float
    causal: bool
    window: int | None
    ring: bool
    has_first: bool


def _rows(ref: Any, *index: Array) -> Any:
    """Whole rows of the last axis at `index` of the others: `[len(index[0]), H]`."""
    return ref.at[*(at[:, None] for at in index), jnp.arange(ref.shape[-1])[None, :]]


def _load(ref: Any, real: Array, *index: Array) -> Array:
    """Rows of `ref`, zero where they are not `real`: what stands there is never read."""
    return plt.load(_rows(ref, *index), mask=_wide(real, ref.shape[-1]), other=0.0)


def _wide(mask: Array, width: int) -> Array:
    return jnp.broadcast_to(mask[:, None], (mask.shape[0], width))


Carry = tuple[Array, Array, Array]
"""Weighted values `[rows, H]`, largest score and sum of weights `[rows]`."""


def _add(carry: Carry, q: Array, k: Array, v: Array, seen: Array, scale: float) -> Carry:
    """Take in a tile of keys: softmax over what came so far, in base 2."""
    out, top, total = carry
    scores = jnp.where(seen, _dot(q, k.T) * scale, NOTHING)
    above = jnp.maximum(top, jnp.max(scores, axis=1))
    fade = jnp.exp2(top - above)
    weights = jnp.where(seen, jnp.exp2(scores - above[:, None]), 0.0)
    out = out * fade[:, None] + _dot(weights.astype(v.dtype), v)
    return out, above, total * fade + jnp.sum(weights, axis=1)


def _context(rule: _Rule, tile: Tile, carry: Carry, q: Array, t: Array, begin: Array,
             split: Array, length: Array, k_ref: Any, v_ref: Any) -> Carry:  # fmt: skip
    """This split's share of the cached keys from position `begin` to `length`."""
    slots = k_ref.shape[0]
    tiles = pl.cdiv(jnp.maximum(length - begin, 0), tile.keys)
    share = pl.cdiv(tiles, tile.splits)

    def add(index: Array, carry: Carry) -> Carry:
        start = begin + index * tile.keys
        position = start + jnp.arange(tile.keys)
        slot = position
        if rule.ring:
            slot = start % slots + jnp.arange(tile.keys)
            slot = jnp.where(slot >= slots, slot - slots, slot)
        real = position < length
        k, v = _load(k_ref, real, slot), _load(v_ref, real, slot)
        seen = jnp.broadcast_to(real[None, :], (tile.rows, tile.keys))
        if rule.window is not None:
            seen &= position[None, :] > length + t[:, None] - rule.window
        return _add(carry, q, k, v, seen, rule.scale)

    return lax.fori_loop(split * share, jnp.minimum((split + 1) * share, tiles), add, carry)


def _block(rule: _Rule, tile: Tile, carry: Carry, q: Array, t: Array, t_first: Array,
           t_last: Array, k_ref: Any, v_ref: Any) -> Carry:  # fmt: skip
    """The block's own keys."""
    T, window = rule.T, rule.window
    keys = min(max(LEAST, _power_of_two(T)), tile.keys)

    def add(index: Array | int, carry: Carry) -> Carry:
        u = index * keys + jnp.arange(keys)
        real = u < T
        k, v = _load(k_ref, real, u), _load(v_ref, real, u)
        seen = jnp.broadcast_to(real[None, :], (tile.rows, keys))
        if rule.causal:
            seen &= u[None, :] <= t[:, None]
        if window is not None:
            seen &= jnp.abs(u[None, :] - t[:, None]) < window
        return _add(carry, q, k, v, seen, rule.scale)

    if keys >= T:
        return add(0, carry)
    begin, end = jnp.int32(0), jnp.int32(T)
    if rule.causal:
        end = t_last + 1
    if window is not None:
        begin = jnp.maximum(t_first - (window - 1), 0)
        end = jnp.minimum(end, t_last + window)
    return lax.fori_loop(begin // keys, pl.cdiv(end, keys), add, carry)


def _attend(rule: _Rule, tile: Tile, length_ref: Any, first_ref: Any, q_ref: Any, k_ref: Any,
            v_ref: Any, k_block_ref: Any, v_block_ref: Any, out_ref: Any,
            *lse_ref: Any) -> None:  # fmt: skip
    """The program of a tile of rows and a split."""
    split, index = pl.program_id(1) % tile.splits, pl.program_id(1) // tile.splits
    row = index * tile.rows + jnp.arange(tile.rows)
    real = row < rule.T * rule.G
    t = row // rule.G
    t_first = index * tile.rows // rule.G
    t_last = jnp.minimum((index * tile.rows + tile.rows - 1) // rule.G, rule.T - 1)
    length = length_ref[0]
    begin = first_ref[0] if rule.has_first else jnp.int32(0)
    if rule.window is not None:
        begin = jnp.maximum(begin, length + t_first - (rule.window - 1))
    begin = jnp.maximum(begin, 0)

    q = _load(q_ref, real, t, row % rule.G)
    carry = (
        jnp.zeros((tile.rows, q.shape[1]), jnp.float32),
        jnp.full((tile.rows,), NOTHING, jnp.float32),
        jnp.zeros((tile.rows,), jnp.float32),
    )
    carry = _context(rule, tile, carry, q, t, begin, split, length, k_ref, v_ref)

    def own(carry: Carry) -> Carry:
        return _block(rule, tile, carry, q, t, t_first, t_last, k_block_ref, v_block_ref)

    if tile.splits == 1:
        out, _, total = own(carry)
        out = out / jnp.maximum(total, 1e-30)[:, None]
        at = _rows(out_ref, t, row % rule.G)
        plt.store(at, out.astype(out_ref.dtype), mask=_wide(real, out.shape[1]))
        return
    # The last split has the least of the context, often none.
    out, top, total = lax.cond(split == tile.splits - 1, own, lambda carry: carry, carry)
    filled = total > 0
    out = out / jnp.maximum(total, 1e-30)[:, None]
    # An empty split writes no values, and the merge reads none of it.
    plt.store(_rows(out_ref, row), out, mask=_wide(real & filled, out.shape[1]))
    lse = jnp.where(filled, top + jnp.log2(jnp.maximum(total, 1e-30)), NOTHING)
    plt.store(lse_ref[0].at[row], lse)


def _merge(G: int, rows: int, part_ref: Any, lse_ref: Any, out_ref: Any) -> None:
    """The program of a few rows: splits weighted by the sums of their softmax."""
    splits, _, width = part_ref.shape
    row = pl.program_id(1) * rows + jnp.arange(rows)
    split = jnp.arange(splits)
    lse = plt.load(lse_ref.at[split[:, None], row[None, :]])
    filled = jnp.broadcast_to((lse > NOTHING / 2)[:, :, None], (splits, rows, width))
    at = part_ref.at[split[:, None, None], row[None, :, None], jnp.arange(width)[None, None, :]]
    part = plt.load(at, mask=filled, other=0.0)
    weights = jnp.exp2(lse - jnp.max(lse, axis=0)[None, :])
    weights = weights / jnp.sum(weights, axis=0)[None, :]
    out = jnp.sum(part * weights[:, :, None], axis=0)
    real = _wide(row < out_ref.shape[0] * G, width)
    plt.store(_rows(out_ref, row // G, row % G), out.astype(out_ref.dtype), mask=real)


def block_attention(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    k_block: Float[Array, "B T K H"],
    v_block: Float[Array, "B T K H"],
    length: Int[Array, " B"],
    *,
    first: Int[Array, " B"] | None = None,
    scale: float,
    causal: bool,
    window: int | None = None,
    ring: bool = False,
    interpret: bool = False,
    tile: Tile | None = None,
) -> Float[Array, "B T N H"]:
    """`pallas_kernels.block_attention`; `tile` replaces the choice of sizes."""
    B, T, N, H = q.shape
    K, S = k_cache.shape[1:3]
    G = N // K
    tile = tile or _tile(q, k_cache, window)
    tiles = pl.cdiv(T * G, tile.rows)
    rule = _Rule(
        T=T, G=G, scale=scale * math.log2(math.e), causal=causal, window=window, ring=ring,
        has_first=first is not None,
    )  # fmt: skip

    def whole(*shape: int | None) -> pl.BlockSpec:
        """What belongs to the batch row and the key/value head of program `(i, j)`."""
        zeros = [0] * (len(shape) - 2)
        if shape[1] is None:
            return pl.BlockSpec(shape, lambda i, _: (i // K, i % K, *zeros))
        return pl.BlockSpec(shape, lambda i, _: (i // K, 0, i % K, *zeros[1:]))

    scalar = pl.BlockSpec((1,), lambda i, _: (i // K,))
    context, block = whole(None, None, S, H), whole(None, T, None, H)
    grouped = whole(None, T, None, G, H)
    out_type = jax.ShapeDtypeStruct((B, T, K, G, H), v_block.dtype)
    rows = tiles * tile.rows
    split_specs, split_types = [grouped], [out_type]
    if tile.splits > 1:
        # Programs of one tile and head differ in the split alone.
        def part(i: Array, j: Array) -> tuple[Array | int, ...]:
            return i // K, i % K, j % tile.splits, 0, 0

        split_specs = [
            pl.BlockSpec((None, None, None, rows, H), part),
            pl.BlockSpec((None, None, None, rows), lambda i, j: part(i, j)[:4]),
        ]
        split_types = [
            jax.ShapeDtypeStruct((B, K, tile.splits, rows, H), jnp.float32),
            jax.ShapeDtypeStruct((B, K, tile.splits, rows), jnp.float32),
        ]
    parts = pl.pallas_call(
        functools.partial(_attend, rule, tile),
        grid=(B * K, tiles * tile.splits),
        in_specs=[scalar, scalar, grouped, context, context, block, block],
        out_specs=split_specs,
        out_shape=split_types,
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="block_attention",
    )(length, length if first is None else first, q.reshape(B, T, K, G, H), k_cache, v_cache,
      k_block, v_block)  # fmt: skip
    if tile.splits == 1:
        return parts[0].reshape(B, T, N, H)
    merged_rows = max(1, min(LEAST, 8192 // (tile.splits * H)))
    out = pl.pallas_call(
        functools.partial(_merge, G, merged_rows),
        grid=(B * K, rows // merged_rows),
        in_specs=[whole(None, None, tile.splits, rows, H), whole(None, None, tile.splits, rows)],
        out_specs=grouped,
        out_shape=out_type,
        compiler_params=plt.CompilerParams(
            num_warps=4 if tile.splits * H <= 16384 else 8, num_stages=1
        ),
        interpret=interpret,
        name="block_attention_merge",
    )(*parts)
    return out.reshape(B, T, N, H)
