"""The sum of a product's parts, its norm, the residual and the next norm as one Pallas kernel for
NVIDIA GPUs (Triton backend): a program a row, which stays in registers.

With few rows it is bound by latency: so everything is asked for before anything is waited for, and
many warps share a row."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.choose import PROCESSORS
from pallas_kernels.norm import Norm, weigh
from pallas_kernels.parts import summed

# Warps of a program: where every processor has a row at most, and where there are more.
FEW_ROWS_WARPS, WARPS = 16, 4
# What a program can hold: columns of a row, in strips of a power of two.
MOST_COLUMNS, MOST_STRIPS, LEAST_STRIP = 8192, 16, 16


def obstacle(width: int) -> str | None:
    """Why the kernel cannot take rows of that width."""
    if width > MOST_COLUMNS:
        return f"width {width} is above {MOST_COLUMNS}, more than a program can hold"
    strip = width & -width
    if strip < LEAST_STRIP or width > MOST_STRIPS * strip:
        return (
            f"width {width} is not made of at most {MOST_STRIPS} strips of one power of two from "
            f"{LEAST_STRIP} on"
        )
    return None


@dataclass(frozen=True)
class _Plan:
    """What a program is compiled for; norms as `_static` has them."""

    post: tuple[bool, float, Any] | None
    has_factor: bool
    norm: tuple[bool, float, Any] | None


def _static(norm: Norm | None) -> tuple[bool, float, Any] | None:
    return None if norm is None else (norm.weight is not None, norm.eps, norm.kind)


def _strips(ref: Any) -> list[Any]:
    """The columns of a row as slices of one power of two: other sizes are no Triton arrays."""
    width = ref.shape[-1]
    size = width & -width
    return [pl.ds(start, size) for start in range(0, width, size)]


def _load(ref: Any) -> list[Array]:
    return [plt.load(ref.at[at]) for at in _strips(ref)]


def _normed(strips: list[Array], static: Any, weights: list[Array], dtype: Any) -> list[Array]:
    """A row in fp32 strips, normed and rounded to `dtype`."""
    has_weight, eps, kind = static
    squares = functools.reduce(jnp.add, [strip * strip for strip in strips])
    width = len(strips) * len(strips[0])
    scale = lax.rsqrt(jnp.sum(squares) / width + eps)
    return [
        weigh(strip * scale, own if has_weight else None, kind, dtype)
        for strip, own in zip(strips, weights if has_weight else strips, strict=True)
    ]


def _row(plan: _Plan, x_ref: Any, parts_ref: Any, *refs: Any) -> None:
    """The program of a row."""
    rest = iter(refs)
    post = _load(next(rest)) if plan.post and plan.post[0] else []
    factor = next(rest)[0].astype(jnp.float32) if plan.has_factor else None
    weight = _load(next(rest)) if plan.norm and plan.norm[0] else []
    out_ref, *normed_ref = rest
    dtype, wide = out_ref.dtype, jnp.float32
    before = _load(x_ref)

    def total(at: Any) -> Array:
        # Rounded as a product's result is.
        return summed(lambda part: plt.load(parts_ref.at[part, at]), parts_ref.shape[0]).astype(
            dtype
        )

    strips = _strips(x_ref)
    added = [total(at) for at in strips]
    if plan.post is not None:
        added = _normed([one.astype(wide) for one in added], plan.post, post, dtype)
    stream = [
        (one.astype(wide) + more.astype(wide)).astype(dtype)
        for one, more in zip(before, added, strict=True)
    ]
    if factor is not None:
        stream = [(one.astype(wide) * factor).astype(dtype) for one in stream]
    for at, one in zip(strips, stream, strict=True):
        plt.store(out_ref.at[at], one)
    if plan.norm is not None:
        normed = _normed([one.astype(wide) for one in stream], plan.norm, weight, dtype)
        for at, one in zip(strips, normed, strict=True):
            plt.store(normed_ref[0].at[at], one)


def residual_norm(
    x: Float[Array, "R D"],
    parts: Float[Array, "S P D"],
    norm: Norm | None,
    *,
    post: Norm | None = None,
    factor: Float[Array, " 1"] | None = None,
    interpret: bool = False,
    warps: int | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "R D"]]:
    """`pallas_kernels.residual_norm`; `warps` share a row."""
    if warps is None:
        warps = FEW_ROWS_WARPS if len(x) <= PROCESSORS else WARPS
    R, D = x.shape
    plan = _Plan(
        post=_static(post),
        has_factor=factor is not None,
        norm=_static(norm),
    )
    row, all_columns = pl.BlockSpec((None, D), lambda i: (i, 0)), pl.BlockSpec((D,), lambda _: (0,))
    optional = [
        (None if post is None else post.weight, all_columns),
        (factor, pl.BlockSpec((1,), lambda _: (0,))),
        (None if norm is None else norm.weight, all_columns),
    ]
    given = [(array, spec) for array, spec in optional if array is not None]
    outputs = 1 if norm is None else 2
    made = pl.pallas_call(
        functools.partial(_row, plan),
        grid=(R,),
        in_specs=[
            row,
            pl.BlockSpec((parts.shape[0], None, D), lambda i: (0, i, 0)),
            *(spec for _, spec in given),
        ],
        out_specs=[row] * outputs,
        out_shape=[jax.ShapeDtypeStruct((R, D), x.dtype)] * outputs,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="residual_norm",
    )(x, parts, *(array for array, _ in given))
    return made[0], made[-1]
