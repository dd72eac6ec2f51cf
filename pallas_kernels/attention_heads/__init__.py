"""Queries, keys and values of an attention layer, from their projections to where they are read.

What lies between the projections and `block_attention`: norms of heads, rotation, and the write of
keys and values to the cache.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention_heads import gpu, reference
from pallas_kernels.attention_heads.reference import HeadRows, Slots, apply_rotary, write_rows
from pallas_kernels.choose import Kernels, implementation
from pallas_kernels.norm import Norm

__all__ = ["HeadRows", "Slots", "apply_rotary", "attention_heads", "write_rows"]


def attention_heads(
    q: Float[Array, "B T NQ"] | None,
    k: Float[Array, "B T KH"] | None,
    v: Float[Array, "B T KH"] | None,
    angles: Float[Array, "B T half"],
    *,
    head_dim: int,
    gated: bool = False,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    v_norm: Norm | None = None,
    slots: Slots | None = None,
    kernels: Kernels = "reference",
) -> HeadRows:
    """Norm the heads of projections `q`, `k` and `v`, rotate those of `q` and `k`.

    Either `q`, or `k` and `v`, may be None. With `gated` each query head of `q` is followed by a
    gate of its width, which is skipped. Rotation turns the first `2 * half` dimensions of a head
    (`apply_rotary`).

    With `slots`, keys and values are also written to a cache, by the kernel in place. That is safe
    before the block's own attention reads the cache: see `layers.cache.may_write_first`.

    Every intermediate is rounded where the layers of the models round it. The kernel has no
    gradient: training takes the reference.

    Raises:
        ValueError: nothing to do, keys without values, or a cache without keys and values.
        KernelError: `kernels` names a kernel that cannot run here.
    """
    if (k is None) != (v is None) or (q is None and k is None):
        raise ValueError("attention heads need queries, or keys and values, or all three")
    if slots is not None and k is None:
        raise ValueError("there are no keys and values to write to the cache")
    given = [x for x in (q, k, v) if x is not None]
    obstacle = None if kernels == "reference" else gpu.obstacle(given, head_dim, slots)
    chosen = implementation("attention_heads", kernels, jnp.dtype(given[0].dtype), obstacle)
    if chosen == "reference":
        return reference.attention_heads(
            q, k, v, angles, head_dim=head_dim, gated=gated, q_norm=q_norm, k_norm=k_norm,
            v_norm=v_norm, slots=slots,
        )  # fmt: skip
    return gpu.attention_heads(
        q, k, v, angles, head_dim=head_dim, gated=gated, q_norm=q_norm, k_norm=k_norm,
        v_norm=v_norm, slots=slots, interpret=chosen == "interpret",
    )  # fmt: skip
