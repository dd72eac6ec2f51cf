"""The kernel of block attention as a function with a gradient."""

import functools

import jax
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.block_attention import gpu, gpu_backward
from pallas_kernels.block_attention.gpu_rows import Rule
from pallas_kernels.choose import KernelError

Static = tuple[Rule, bool]
"""What is computed, and whether in Pallas' interpreter."""
Arguments = tuple[Array, Array, Array, Array, Array, Array]
"""q, both caches, both own sides, lengths, as `pallas_kernels.block_attention` takes them."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(static: Static, arguments: Arguments, first: Array | None) -> Float[Array, "R T N H"]:
    """`pallas_kernels.block_attention` by the kernel."""
    rule, interpret = static
    return gpu.block_attention(rule, arguments, first, interpret=interpret)


def _forward(static: Static, arguments: Arguments, first: Array | None) -> tuple[Array, tuple]:
    """Also what the gradient needs.

    Raises:
        KernelError: there is no gradient for these arguments.
    """
    rule, interpret = static
    q, cache = arguments[:2]
    if (obstacle := gpu_backward.obstacle(q, cache, rule.ring)) is not None:
        raise KernelError(f"block_attention has no gradient here: {obstacle}; use reference")
    out, lse = gpu.attend_with_sums(rule, arguments, first, interpret=interpret)
    return out.reshape(q.shape), (arguments, first, out, lse)


def _backward(static: Static, kept: tuple, d_out: Array) -> tuple:
    rule, interpret = static
    arguments, first, out, lse = kept
    made = gpu_backward.gradients(rule, arguments, first, out, lse, d_out, interpret=interpret)
    return (*made, _none(arguments[-1])), None if first is None else _none(first)


def _none(x: Array) -> np.ndarray:
    """What JAX wants as the gradient of integers."""
    return np.zeros(x.shape, jax.dtypes.float0)


attend.defvjp(_forward, _backward)
