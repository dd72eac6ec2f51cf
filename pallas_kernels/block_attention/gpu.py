"""Block attention as a Pallas kernel for NVIDIA GPUs (Triton backend).

A program takes one key/value head of one batch row, a tile of its query rows (`T x G` of them:
the G query heads of a group are rows of one product) and a share of the context. Several programs
share a context ("splits", Dao et al., Flash-Decoding); a second kernel merges their results, in
fp32. Reading follows the length of each row, not the capacity of the cache.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention.gpu_rows import (
    Rule,
    load_rows,
    of_block,
    of_head,
    rows_at,
    seen_block,
    seen_context,
    wide,
)
from pallas_kernels.block_attention.gpu_tile import Tile, own_tile
from pallas_kernels.tiles import LEAST, dot, power_of_two

# Finite, so that a split without keys never produces NaN through inf - inf.
NOTHING = -1e30


def obstacle(q: Array, cache: Array, ring: bool) -> str | None:
    """Why the kernel cannot take these arguments."""
    width = q.shape[-1]
    if width < LEAST or width & (width - 1):
        return f"head width {width} is no power of two from {LEAST} on"
    if q.dtype != cache.dtype:
        return f"queries are {q.dtype}, the cache is {cache.dtype}"
    keys = own_tile(q, cache, None).keys
    if ring and cache.shape[2] < keys:
        return f"a ring of {cache.shape[2]} slots is smaller than a tile of {keys} keys"
    return None


Carry = tuple[Array, Array, Array]
"""Weighted values `[rows, H]`, largest score and sum of weights `[rows]`."""


def _add(carry: Carry, q: Array, k: Array, v: Array, seen: Array, scale: float) -> Carry:
    """Take in a tile of keys: softmax over what came so far, in base 2."""
    out, top, total = carry
    scores = jnp.where(seen, dot(q, k.T) * scale, NOTHING)
    # A row that has seen no key yet weighs unseen ones like seen ones: that fades to nothing with
    # the first it sees, and every row sees itself. A split that sees none is not merged.
    above = jnp.maximum(top, jnp.max(scores, axis=1))
    fade = jnp.exp2(top - above)
    weights = jnp.exp2(scores - above[:, None])
    out = out * fade[:, None] + dot(weights.astype(v.dtype), v)
    return out, above, total * fade + jnp.sum(weights, axis=1)


def _context(rule: Rule, tile: Tile, carry: Carry, q: Array, t: Array, begin: Array,
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
        k, v = load_rows(k_ref, real, slot), load_rows(v_ref, real, slot)
        return _add(carry, q, k, v, seen_context(rule, real, position, t, length), rule.scale)

    return lax.fori_loop(split * share, jnp.minimum((split + 1) * share, tiles), add, carry)


def _block(rule: Rule, tile: Tile, carry: Carry, q: Array, t: Array, t_first: Array,
           t_last: Array, k_ref: Any, v_ref: Any) -> Carry:  # fmt: skip
    """The block's own keys."""
    T, window = rule.T, rule.window
    keys = min(max(LEAST, power_of_two(T)), tile.keys)

    def add(index: Array | int, carry: Carry) -> Carry:
        u = index * keys + jnp.arange(keys)
        k, v = load_rows(k_ref, u < T, u), load_rows(v_ref, u < T, u)
        return _add(carry, q, k, v, seen_block(rule, u, t), rule.scale)

    if keys >= T:
        return add(0, carry)
    begin, end = jnp.int32(0), jnp.int32(T)
    if rule.causal:
        end = t_last + 1
    if window is not None:
        begin = jnp.maximum(t_first - (window - 1), 0)
        end = jnp.minimum(end, t_last + window)
    return lax.fori_loop(begin // keys, pl.cdiv(end, keys), add, carry)


def _attend(rule: Rule, tile: Tile, length_ref: Any, first_ref: Any, q_ref: Any, k_ref: Any,
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

    q = load_rows(q_ref, real, t, row % rule.G)
    carry = (
        jnp.zeros((tile.rows, q.shape[1]), jnp.float32),
        jnp.full((tile.rows,), NOTHING, jnp.float32),
        jnp.zeros((tile.rows,), jnp.float32),
    )
    carry = _context(rule, tile, carry, q, t, begin, split, length, k_ref, v_ref)

    def own(carry: Carry) -> Carry:
        return _block(rule, tile, carry, q, t, t_first, t_last, k_block_ref, v_block_ref)

    if tile.splits == 1:
        out, top, total = own(carry)
        out = out / jnp.maximum(total, 1e-30)[:, None]
        at = rows_at(out_ref, t, row % rule.G)
        plt.store(at, out.astype(out_ref.dtype), mask=wide(real, out.shape[1]))
        if lse_ref:
            plt.store(lse_ref[0].at[row], top + jnp.log2(jnp.maximum(total, 1e-30)))
        return
    # The last split has the least of the context, often none.
    out, top, total = lax.cond(split == tile.splits - 1, own, lambda carry: carry, carry)
    filled = total > 0
    out = out / jnp.maximum(total, 1e-30)[:, None]
    # An empty split writes no values, and the merge reads none of it.
    plt.store(rows_at(out_ref, row), out, mask=wide(real & filled, out.shape[1]))
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
    real = wide(row < out_ref.shape[0] * G, width)
    plt.store(rows_at(out_ref, row // G, row % G), out.astype(out_ref.dtype), mask=real)


def block_attention(
    rule: Rule,
    arguments: tuple[Array, ...],
    first: Int[Array, " R"] | None,
    *,
    interpret: bool = False,
    tile: Tile | None = None,
) -> Float[Array, "R T N H"]:
    """`pallas_kernels.block_attention` of its `arguments`; `tile` replaces the choice of sizes."""
    q, cache, *_, v_block, _ = arguments
    tile = tile or own_tile(q, cache, rule.window)
    parts = _launch(rule, tile, arguments, first, interpret=interpret)
    out = parts[0] if tile.splits == 1 else _merged(rule, tile, parts, v_block.dtype, interpret)
    return out.reshape(q.shape)


def attend_with_sums(
    rule: Rule, arguments: tuple[Array, ...], first: Int[Array, " R"] | None, *, interpret: bool
) -> tuple[Float[Array, "R T K G H"], Float[Array, "R K rows"]]:
    """Outputs, and the logarithms (of two) of the softmax's sums."""
    q, cache = arguments[:2]
    tile = dataclasses.replace(own_tile(q, cache, rule.window), splits=1)
    out, lse = _launch(rule, tile, arguments, first, interpret=interpret, with_lse=True)
    return out, lse


def _launch(
    rule: Rule, tile: Tile, arguments: tuple[Array, ...], first: Array | None, *, interpret: bool,
    with_lse: bool = False,
) -> Sequence[Array]:  # fmt: skip
    """Outputs `[R, T, K, G, H]`, and `with_lse` the logarithms (of two) of the softmax's sums
    `[R, K, rows]`; of several splits always both, each split's own, before their merge."""
    q, k_cache, v_cache, k_block, v_block, length = arguments
    R, T, N, H = q.shape
    B, K, S = k_cache.shape[:3]
    G = N // K
    tiles = pl.cdiv(T * G, tile.rows)
    rows = tiles * tile.rows
    scalar = pl.BlockSpec((1,), lambda i, _: (i // K,))
    # Blocks of one context follow one another.
    context = pl.BlockSpec((None, None, S, H), lambda i, _: (i // (K * (R // B)), i % K, 0, 0))
    block, grouped = of_block(K, T, None, H), of_block(K, T, None, G, H)
    split_specs: list[Any] = [grouped]
    split_types = [jax.ShapeDtypeStruct((R, T, K, G, H), v_block.dtype)]
    if with_lse:
        split_specs.append(of_head(K, rows))
        split_types.append(jax.ShapeDtypeStruct((R, K, rows), jnp.float32))
    if tile.splits > 1:
        # Programs of one tile and head differ in the split alone.
        def part(i: Array, j: Array) -> tuple[Array | int, ...]:
            return i // K, i % K, j % tile.splits, 0, 0

        split_specs = [
            pl.BlockSpec((None, None, None, rows, H), part),
            pl.BlockSpec((None, None, None, rows), lambda i, j: part(i, j)[:4]),
        ]
        split_types = [
            jax.ShapeDtypeStruct((R, K, tile.splits, rows, H), jnp.float32),
            jax.ShapeDtypeStruct((R, K, tile.splits, rows), jnp.float32),
        ]
    return pl.pallas_call(
        functools.partial(_attend, rule, tile),
        grid=(R * K, tiles * tile.splits),
        in_specs=[scalar, scalar, grouped, context, context, block, block],
        out_specs=split_specs,
        out_shape=split_types,
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="block_attention",
    )(length, length if first is None else first, q.reshape(R, T, K, G, H), k_cache, v_cache,
      k_block, v_block)  # fmt: skip


def _merged(
    rule: Rule, tile: Tile, parts: Sequence[Array], dtype: Any, interpret: bool
) -> Float[Array, "R T K G H"]:
    """Splits, weighted by the sums of their softmax."""
    R, K, _, rows, H = parts[0].shape
    merged_rows = max(1, min(LEAST, 8192 // (tile.splits * H)))
    return pl.pallas_call(
        functools.partial(_merge, rule.G, merged_rows),
        grid=(R * K, rows // merged_rows),
        in_specs=[of_head(K, tile.splits, rows, H), of_head(K, tile.splits, rows)],
        out_specs=of_block(K, rule.T, None, rule.G, H),
        out_shape=jax.ShapeDtypeStruct((R, rule.T, K, rule.G, H), dtype),
        compiler_params=plt.CompilerParams(
            num_warps=4 if tile.splits * H <= 16384 else 8, num_stages=1
        ),
        interpret=interpret,
        name="block_attention_merge",
    )(*parts)
