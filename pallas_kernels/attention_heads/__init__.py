"""Queries, keys and values of an attention layer, from their projections to where they are read.

What lies between the projections and `block_attention`: norms of heads, rotation, and the write of
keys and values to the cache.
"""

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.attention_heads import gpu, reference
from pallas_kernels.attention_heads.reference import HeadRows, Slots, apply_rotary, write_rows
from pallas_kernels.choose import Kernels, implementation
from pallas_kernels.norm import Norm
from pallas_kernels.parts import check_rows, number_of_parts

__all__ = ["HeadRows", "Slots", "apply_rotary", "attention_heads", "splits", "write_rows"]


FEW_ROWS = 32
"""With more the parts of a product are more to write and to read than a launch is worth."""


def splits(
    rows: int, width_in: int, width_out: int, head_dim: int, dtype: DTypeLike, kernels: Kernels
) -> int:
    """In how many parts `attention_heads` wants a product of `rows` with `[width_in, width_out]`
    weights in `dtype`: the reference in one.

    Raises:
        KernelError: `kernels` names a kernel that cannot run here.
    """
    if rows > FEW_ROWS or _chosen(head_dim, dtype, None, kernels) == "reference":
        return 1
    return number_of_parts(rows, width_in, width_out)


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
    kernels: Kernels = "reference",
) -> HeadRows:
    """Norm the heads of projections `q`, `k` and `v`, rotate those of `q` and `k`.

    Projections are parts that sum to them, each sum rounded to `dtype` once; their rows follow the
    batch axes of `angles`, and rows beyond those are ignored (`pallas_kernels.parts`).

    Either `q`, or `k` and `v`, may be None. With `gated` each query head of `q` is followed by a
    gate of its width, which is skipped. Rotation turns the first `2 * half` dimensions of a head
    (`apply_rotary`).

    With `slots`, keys and values are also written to a cache, by the kernel in place. That is safe
    before the block's own attention reads the cache: see `layers.cache.may_write_first`.

    Every intermediate is rounded where the layers of the models round it. The kernel has no
    gradient: training takes the reference.

    Raises:
        ValueError: nothing to do, keys without values, a cache without keys and values, or a
            projection of too few rows.
        KernelError: `kernels` names a kernel that cannot run here.
    """
    if (k is None) != (v is None) or (q is None and k is None):
        raise ValueError("attention heads need queries, or keys and values, or all three")
    if slots is not None and k is None:
        raise ValueError("there are no keys and values to write to the cache")
    for x in (q, k, v):
        if x is not None:
            check_rows(x, angles.shape[0] * angles.shape[1], "attention_heads")
    chosen = _chosen(head_dim, dtype, slots, kernels)
    if chosen == "reference":
        return reference.attention_heads(
            q, k, v, angles, dtype=dtype, head_dim=head_dim, gated=gated, q_norm=q_norm,
            k_norm=k_norm, v_norm=v_norm, slots=slots,
        )  # fmt: skip
    return gpu.attention_heads(
        q, k, v, angles, dtype=dtype, head_dim=head_dim, gated=gated, q_norm=q_norm, k_norm=k_norm,
        v_norm=v_norm, slots=slots, interpret=chosen == "interpret",
    )  # fmt: skip


def _chosen(head_dim: int, dtype: DTypeLike, slots: Slots | None, kernels: Kernels) -> str:
    obstacle = None if kernels == "reference" else gpu.obstacle(head_dim, dtype, slots)
    return implementation("attention_heads", kernels, dtype, obstacle)
