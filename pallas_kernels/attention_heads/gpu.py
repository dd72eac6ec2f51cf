"""Attention heads as a Pallas kernel for NVIDIA GPUs (Triton backend).

A program takes a few tokens of one head: queries, then keys, then values. It reads them from the
joined projection, which XLA hands over as it is, and writes rows for `block_attention` and, for
keys and values, the cache in place. Rows are held as they are and with the halves of the rotation
swapped, the second time from the first-level cache: so nothing is moved between threads.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.attention_heads.reference import HeadRows, Slots, turns
from pallas_kernels.norm import Norm, weigh
from pallas_kernels.parts import summed

# Numbers that a program holds: enough programs for all processors at batch 1.
SHARE = 1024


def obstacle(head_dim: int, dtype: DTypeLike, slots: Slots | None) -> str | None:
    """Why the kernel cannot take these arguments."""
    if head_dim & (head_dim - 1):
        return f"head width {head_dim} is no power of two"
    for cache in _caches(slots):
        if cache.dtype != dtype:
            return f"heads are {jnp.dtype(dtype).name}, their cache is {cache.dtype.name}"
    return None


def _caches(slots: Slots | None) -> tuple[Array, ...]:
    return () if slots is None else (slots.k, slots.v)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Heads of one kind: where they lie in the joined projection, and what is done to them."""

    name: str
    first: int
    heads: int
    column: int
    stride: int
    norm: Norm | None
    turned: bool


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """`rows` tokens of T, heads of width H of which `2 * half` dimensions turn; of `dtype`."""

    T: int
    rows: int
    H: int
    half: int
    ring: bool
    dtype: Any


def _wide(mask: Array, shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(mask[:, None] if mask.ndim == 1 else mask, shape)


def _normed(norm: Norm | None, weight_ref: Any, x: Array, factor: Array, place: Array) -> Array:
    """Loaded dimensions `place` of a head, normed, in the dtype of `x`."""
    if norm is None:
        return x
    weight = None
    if weight_ref is not None:
        weight = jnp.broadcast_to(plt.load(weight_ref.at[place])[None, :], x.shape)
    return weigh(x.astype(jnp.float32) * factor[:, None], weight, norm.kind, x.dtype)


def _product(a: Array, b: Array) -> Array:
    """Rounded to the dtype of `a` and wide again: the compiler would join a product in that dtype
    with the sum that follows."""
    product = a.astype(jnp.float32) * b.astype(jnp.float32)
    return product.astype(a.dtype).astype(jnp.float32)


def _head(
    sizes: _Sizes, part: _Part, head: Array, first: Array, t: Array, inputs: dict[str, Any]
) -> Array:
    """Normed and rotated rows `[rows, H]` of one head; the product's row `first` is token 0's."""
    H, half = sizes.H, sizes.half
    shape, real = (sizes.rows, H), t < sizes.T
    place = jnp.arange(H)
    column = part.column + head * part.stride

    # Rows of a product follow one another, whatever batch row they are of.
    product, row = inputs["x"], (first + t)[:, None]

    def load(place: Array) -> Array:
        columns, mask = (column + place)[None, :], _wide(real, shape)

        def share(number: Any) -> Array:
            return plt.load(product.at[number, row, columns], mask=mask, other=0.0)

        return summed(share, product.shape[0]).astype(sizes.dtype)

    x, weight_ref = load(place), inputs.get(f"{part.name}_weight")
    factor = jnp.ones((sizes.rows,), jnp.float32)
    if part.norm is not None:
        wide = x.astype(jnp.float32)
        factor = lax.rsqrt(jnp.sum(wide * wide, axis=1) / H + part.norm.eps)
    own = _normed(part.norm, weight_ref, x, factor, place)
    if not part.turned:
        return own
    turns = place < 2 * half
    other_place = jnp.where(turns, jnp.where(place < half, place + half, place - half), place)
    other = _normed(part.norm, weight_ref, load(other_place), factor, other_place)

    def turn(first: int) -> Array:
        at = inputs["turns"].at[t[:, None], (first + place)[None, :]]
        mask = _wide(real, shape) & _wide(turns[None, :], shape)
        return plt.load(at, mask=mask, other=0.0)

    turned = _product(own, turn(0)) + _product(other, turn(2 * half))
    return jnp.where(_wide(turns[None, :], shape), turned.astype(x.dtype), own)


def _write(sizes: _Sizes, cache_ref: Any, rows: Array, head: Array, t: Array,
           inputs: dict[str, Any]) -> None:  # fmt: skip
    """Tokens of one head to their slots (`reference.write_rows`)."""
    slots, count = cache_ref.shape[1], inputs["count"][0]
    slot = inputs["start"][0] + t
    wanted = (t < sizes.T) & (t < count)
    if sizes.ring:
        wanted &= t >= count - slots
        slot = lax.rem(slot, slots)
    wanted &= slot < slots
    place = jnp.arange(sizes.H)
    at = cache_ref.at[head, slot[:, None], place[None, :]]
    plt.store(at, rows, mask=_wide(wanted, rows.shape))


def _program(
    sizes: _Sizes, parts: tuple[_Part, ...], _: Any, inputs: dict[str, Any],
    caches: tuple[Any, ...], outputs: dict[str, Any],
) -> None:  # fmt: skip
    """The program of a few tokens of one head of one batch row."""
    index = pl.program_id(0)
    first = pl.program_id(2) * sizes.T
    t = pl.program_id(1) * sizes.rows + jnp.arange(sizes.rows)

    def run(part: _Part) -> None:
        head = index - part.first
        rows = _head(sizes, part, head, first, t, inputs)
        at = outputs[part.name].at[t[:, None], head, jnp.arange(sizes.H)[None, :]]
        plt.store(at, rows, mask=_wide(t < sizes.T, rows.shape))
        if caches and part.name != "q":
            _write(sizes, caches["kv".index(part.name)], rows, head, t, inputs)

    for part in parts:
        pl.when((index >= part.first) & (index < part.first + part.heads))(
            functools.partial(run, part)
        )


def _parts(
    projected: Mapping[str, Array | None], norms: Mapping[str, Norm | None], head_dim: int,
    gated: bool,
) -> tuple[_Part, ...]:  # fmt: skip
    """Where programs find the heads of what is there, side by side."""
    parts: list[_Part] = []
    programs = column = 0
    for name, x in projected.items():
        if x is None:
            continue
        stride = head_dim * (1 + (gated and name == "q"))
        heads = x.shape[-1] // stride
        parts.append(_Part(
            name=name, first=programs, heads=heads, column=column, stride=stride,
            norm=norms[name], turned=name != "v",
        ))  # fmt: skip
        programs, column = programs + heads, column + x.shape[-1]
    return tuple(parts)


def attention_heads(
    q: Float[Array, "S P NQ"] | None,
    k: Float[Array, "S P KH"] | None,
    v: Float[Array, "S P KH"] | None,
    angles: Float[Array, "B T half"],
    *,
    dtype: DTypeLike,
    head_dim: int,
    gated: bool = False,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    v_norm: Norm | None = None,
    slots: Slots | None = None,
    interpret: bool = False,
) -> HeadRows:
    """`pallas_kernels.attention_heads`."""
    norms, projected = {"q": q_norm, "k": k_norm, "v": v_norm}, {"q": q, "k": k, "v": v}
    parts = _parts(projected, norms, head_dim, gated)
    # In a layer these are columns of one product; joined again, XLA passes on the whole of it.
    x = jnp.concatenate([x for x in projected.values() if x is not None], axis=-1)
    B, T = angles.shape[:2]
    rows = min(pl.next_power_of_2(T), max(1, SHARE // head_dim))
    ring = slots is not None and slots.ring
    sizes = _Sizes(T=T, rows=rows, H=head_dim, half=angles.shape[-1], ring=ring, dtype=dtype)
    cosine, sine = turns(angles, jnp.dtype(dtype))
    # For each dimension, the factor of its own and of the other half's value.
    inputs = {"x": x, "turns": jnp.concatenate([cosine, cosine, -sine, sine], axis=-1)}
    for name, norm in norms.items():
        if projected[name] is not None and norm is not None and norm.weight is not None:
            inputs[f"{name}_weight"] = norm.weight
    if slots is not None:
        inputs |= {"start": slots.start, "count": slots.count}

    def spec(name: str, x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        """What belongs to a batch row; weights and the product are every row's."""
        zeros = (0,) * (len(x.shape) - 1)
        if name == "x" or name.endswith("weight"):
            return pl.BlockSpec(x.shape, lambda *_: (0, *zeros))
        return pl.BlockSpec((None if zeros else 1, *x.shape[1:]), lambda *at: (at[2], *zeros))

    outputs = {
        part.name: jax.ShapeDtypeStruct((B, T, part.heads, head_dim), dtype) for part in parts
    }
    kept = _caches(slots)
    cache_specs = tuple(spec("cache", cache) for cache in kept)
    written, made = pl.pallas_call(
        functools.partial(_program, sizes, parts),
        grid=(sum(part.heads for part in parts), pl.cdiv(T, rows), B),
        in_specs=[cache_specs, {name: spec(name, x) for name, x in inputs.items()}],
        out_specs=[cache_specs, {name: spec(name, x) for name, x in outputs.items()}],
        out_shape=[tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept), outputs],
        input_output_aliases={i: i for i in range(len(kept))},
        compiler_params=plt.CompilerParams(
            num_warps=max(1, min(4, rows * head_dim // 256)), num_stages=1
        ),
        interpret=interpret,
        name="attention_heads",
    )(kept, inputs)
    return HeadRows(**made, **dict(zip(("k_cache", "v_cache"), written, strict=False)))
