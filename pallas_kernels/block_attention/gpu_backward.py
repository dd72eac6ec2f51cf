"""Gradients of block attention on NVIDIA GPUs (Pallas, Triton backend), for draft training.

Scores are computed anew from queries, keys and the softmax's sums, as in Dao, FlashAttention-2,
section 3.2. One kernel takes a block and gives the gradients of its queries and own keys and
values; another takes a tile of a context and goes through all blocks that read it. Products are of
the inputs' dtype, sums fp32.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

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
from pallas_kernels.tiles import LEAST, dot, power_of_two

# Query rows of a block (tokens times query heads of a group) and width of a head that one program
# can hold.
MOST_ROWS, MOST_WIDTH = 128, 128
KEYS = 64


def obstacle(rows: int, width: int, ring: bool = False) -> str | None:
    """Why blocks of `rows` query rows for each key head have no gradient."""
    if ring:
        return "a ring has forgotten what earlier blocks read"
    if rows > MOST_ROWS:
        return f"a block has {rows} query rows a key head, more than {MOST_ROWS}"
    if width > MOST_WIDTH:
        return f"heads are {width} wide, more than {MOST_WIDTH}"
    return None


def _keys(q: Array) -> int:
    return LEAST if q.dtype.itemsize == 4 else KEYS


def _per_row(ref: Any, row: Array, real: Array) -> Array:
    return plt.load(ref.at[row], mask=real, other=0.0)


def _scores(rule: Rule, q: Array, k: Array, lse: Array, seen: Array) -> Array:
    """Weights of the softmax, `[rows, keys]`."""
    return jnp.where(seen, jnp.exp2(dot(q, k.T) * rule.scale - lse[:, None]), 0.0)


def _of_block(rule: Rule, rows: int, keys: int, length_ref: Any, first_ref: Any, q_ref: Any,
              out_ref: Any, lse_ref: Any, delta_ref: Any, k_ref: Any, v_ref: Any, k_own_ref: Any,
              v_own_ref: Any, dq_ref: Any, dk_ref: Any, dv_ref: Any) -> None:  # fmt: skip
    """The program of a block and a key head; `out_ref` holds the gradient of its outputs."""
    row = jnp.arange(rows)
    t, real = row // rule.G, row < rule.T * rule.G
    length, begin = length_ref[0], first_ref[0] if rule.has_first else jnp.int32(0)
    q, d_out = (load_rows(ref, real, t, row % rule.G) for ref in (q_ref, out_ref))
    lse, delta = (_per_row(ref, row, real) for ref in (lse_ref, delta_ref))

    def d_scores(k: Array, v: Array, seen: Array) -> tuple[Array, Array]:
        """Weights of the softmax, and gradients of scores before their scale."""
        weights = _scores(rule, q, k, lse, seen & real[:, None])
        return weights, weights * (dot(d_out, v.T) - delta[:, None])

    def add(index: Array, dq: Array) -> Array:
        position = index * keys + jnp.arange(keys)
        known = (position >= begin) & (position < length)
        k, v = load_rows(k_ref, known, position), load_rows(v_ref, known, position)
        _, ds = d_scores(k, v, seen_context(rule, known, position, t, length))
        return dq + dot(ds.astype(k.dtype), k)

    start = begin if rule.window is None else jnp.maximum(begin, length - (rule.window - 1))
    start = jnp.maximum(start, 0) // keys
    dq = jnp.zeros((rows, q.shape[1]), jnp.float32)
    dq = lax.fori_loop(start, jnp.maximum(start, pl.cdiv(length, keys)), add, dq)

    u = jnp.arange(max(LEAST, power_of_two(rule.T)))
    k, v = load_rows(k_own_ref, u < rule.T, u), load_rows(v_own_ref, u < rule.T, u)
    weights, ds = d_scores(k, v, seen_block(rule, u, t))
    ds = ds.astype(k.dtype)
    dq += dot(ds, k)
    natural = rule.scale / math.log2(math.e)
    at, whole = rows_at(dq_ref, t, row % rule.G), wide(real, q.shape[1])
    plt.store(at, (dq * natural).astype(dq_ref.dtype), mask=whole)
    for ref, gradient in (
        (dk_ref, dot(ds.T, q) * natural),
        (dv_ref, dot(weights.astype(v.dtype).T, d_out)),
    ):
        plt.store(rows_at(ref, u), gradient.astype(ref.dtype), mask=wide(u < rule.T, k.shape[1]))


def _of_context(rule: Rule, rows: int, keys: int, blocks: int, length_ref: Any, first_ref: Any,
                q_ref: Any, out_ref: Any, lse_ref: Any, delta_ref: Any, k_ref: Any, v_ref: Any,
                dk_ref: Any, dv_ref: Any) -> None:  # fmt: skip
    """The program of a tile of keys of one head of one context: all blocks, one after the other."""
    slots, width = k_ref.shape
    low = pl.program_id(1) * keys
    position = low + jnp.arange(keys)
    k, v = (load_rows(ref, position < slots, position) for ref in (k_ref, v_ref))
    row = jnp.arange(rows)
    t, real = row // rule.G, row < rule.T * rule.G

    def add(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        length = length_ref[index]
        begin = first_ref[index] if rule.has_first else jnp.int32(0)
        reads = (length > low) & (begin < low + keys)
        if rule.window is not None:
            reads &= low + keys > length - (rule.window - 1)

        def read(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dk, dv = carry
            at = jnp.full((rows,), index)
            q, d_out = (load_rows(ref, real, at, t, row % rule.G) for ref in (q_ref, out_ref))
            lse, delta = (
                plt.load(ref.at[at, row], mask=real, other=0.0) for ref in (lse_ref, delta_ref)
            )
            # Turned: rows are keys, so that no weights need to be transposed.
            known = (position >= begin) & (position < length)
            seen = seen_context(rule, known, position, t, length) & real[:, None]
            turned = dot(k, q.T) * rule.scale - lse[None, :]
            weights = jnp.where(seen.T, jnp.exp2(turned), 0.0)
            # Zero in every slot that is not seen, whatever stands there.
            ds = jnp.where(seen.T, weights * (dot(v, d_out.T) - delta[None, :]), 0.0)
            dv += dot(weights.astype(v.dtype), d_out)
            return dk + dot(ds.astype(k.dtype), q), dv

        return lax.cond(reads, read, lambda carry: carry, carry)

    none = jnp.zeros((keys, width), jnp.float32)
    dk, dv = lax.fori_loop(0, blocks, add, (none, none))
    natural = rule.scale / math.log2(math.e)
    for ref, gradient in ((dk_ref, dk * natural), (dv_ref, dv)):
        at = rows_at(ref, position)
        plt.store(at, gradient.astype(ref.dtype), mask=wide(position < slots, width))


def gradients(
    rule: Rule, arguments: tuple[Array, ...], first: Array | None, out: Array, lse: Array,
    d_out: Array, *, interpret: bool,
) -> tuple[Array, Array, Array, Array, Array]:  # fmt: skip
    """Of q, both caches and both own sides, each in its dtype.

    `arguments` as the operation takes them, `out` `[R, T, K, G, H]` and `lse` `[R, K, rows]` as
    `gpu.attend_with_sums` gives them, `d_out` `[R, T, N, H]`.
    """
    q, k_cache, v_cache, k_block, v_block, length = arguments
    R, T, _, H = q.shape
    B, K, S = k_cache.shape[:3]
    G, A, keys = rule.G, R // B, _keys(q)
    rows = max(LEAST, power_of_two(T * G))
    grouped = d_out.reshape(out.shape).astype(out.dtype)
    delta = jnp.sum(grouped.astype(jnp.float32) * out.astype(jnp.float32), -1)
    delta = jnp.moveaxis(delta, 1, 2).reshape(R, K, T * G)
    lse = lse[:, :, : T * G]
    q = q.reshape(out.shape)
    first = length if first is None else first

    def options(warps: int) -> dict[str, Any]:
        params = plt.CompilerParams(num_warps=warps, num_stages=2)
        return {"compiler_params": params, "interpret": interpret}

    scalar = pl.BlockSpec((1,), lambda i, _: (i // K,))
    context = pl.BlockSpec((None, None, S, H), lambda i, _: (i // (K * A), i % K, 0, 0))
    own, block, per_row = of_block(K, T, None, H), of_block(K, T, None, G, H), of_head(K, T * G)
    dq, dk_own, dv_own = pl.pallas_call(
        functools.partial(_of_block, rule, rows, keys),
        grid=(R * K, 1),
        in_specs=[
            scalar, scalar, block, block, per_row, per_row, context, context, own, own,
        ],
        out_specs=[block, own, own],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k_block, v_block)],
        name="block_attention_backward",
        **options(8 if rows > 64 else 4),
    )(length, first, q, grouped, lse, delta, k_cache, v_cache, k_block, v_block)  # fmt: skip

    of_all = pl.BlockSpec((A,), lambda i, _: (i // K,))
    blocks = pl.BlockSpec((A, T, None, G, H), lambda i, _: (i // K, 0, i % K, 0, 0))
    per_rows = pl.BlockSpec((A, None, T * G), lambda i, _: (i // K, i % K, 0))
    keyed = pl.BlockSpec((None, None, S, H), lambda i, _: (i // K, i % K, 0, 0))
    dk, dv = pl.pallas_call(
        functools.partial(_of_context, rule, rows, keys, A),
        grid=(B * K, pl.cdiv(S, keys)),
        in_specs=[of_all, of_all, blocks, blocks, per_rows, per_rows, keyed, keyed],
        out_specs=[keyed, keyed],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_cache, v_cache)],
        name="block_attention_backward_context",
        # With four its sums spill registers.
        **options(8),
    )(length, first, q, grouped, lse, delta, k_cache, v_cache)
    return dq.reshape(d_out.shape), dk, dv, dk_own, dv_own
