"""Attention of a block of new tokens to a cached context and to the block itself.

One operation serves drafting (both directions inside the block), verification and chunked
prefill (causal inside the block) and draft training (many blocks over one context, by `vmap`).
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention import gpu, gradient, reference
from pallas_kernels.block_attention.gpu_rows import rule_of
from pallas_kernels.choose import Kernels, implementation
from pallas_kernels.tree import TREE

__all__ = ["block_attention"]


def block_attention(
    q: Float[Array, "R T N H"],
    k_cache: Float[Array, "B K S H"],
    v_cache: Float[Array, "B K S H"],
    k_block: Float[Array, "R U K H"],
    v_block: Float[Array, "R U K H"],
    length: Int[Array, " R"],
    *,
    first: Int[Array, " R"] | None = None,
    parents: Int[Array, "R U"] | None = None,
    scale: float,
    causal: bool,
    window: int | None = None,
    ring: bool = False,
    kernels: Kernels = "reference",
) -> Float[Array, "R T N H"]:
    """Attend from a block at positions `length .. length + T - 1` to context and block.

    Cache slot `s` holds position `s`; in a `ring` it holds the last position below `length` that
    is `s` modulo the number of slots. Query `t` sees context positions below `length` and the
    block's own keys (`j <= t` when `causal`); with a `window` of W it sees only keys whose distance
    is below W, itself included, as transformers counts a sliding window. Slots that hold nothing
    below `length` are never read. Key/value head `k` serves query heads `k*G .. k*G + G - 1`.

    There are as many blocks for every context, one after the other: R is a multiple of B.

    With `first`, context positions below it are never read either: in a packed training row they
    belong to another document.

    With `parents` the block is a tree (`pallas_kernels.tree`): a query sees its ancestors and
    itself, and stands at `length` plus its depth, from which windows are counted. The queries are
    then the last T of U nodes; without `parents`, T equals U. The kernel takes no tree: "auto"
    takes the reference instead and says so.

    A ring needs a `window`, and at least `window - 1` slots more than the rows of any block that
    may be written to it and then rejected: see `layers.cache.write_rows`.

    Softmax runs in fp32; the products of fp32 inputs run at the highest precision. The kernel has a
    gradient too, but not over a ring and not for blocks of more query rows than
    `gpu_backward.MOST_ROWS`.

    Raises:
        ValueError: a ring without a window, a tree that is not `causal`, or a number of blocks that
            the contexts do not divide.
        KernelError: `kernels` names a kernel that cannot run here.
    """
    if ring and window is None:
        raise ValueError("a ring cache forgets old positions, so it needs a window")
    if parents is not None and not causal:
        raise ValueError("a node of a tree sees its ancestors only, so a tree must be causal")
    if q.shape[0] % k_cache.shape[0]:
        raise ValueError(
            f"block_attention: {q.shape[0]} blocks cannot be shared out over {k_cache.shape[0]} "
            "contexts"
        )
    obstacle = None if kernels == "reference" else gpu.obstacle(q, k_cache, ring)
    if parents is not None:
        obstacle = TREE
    chosen = implementation("block_attention", kernels, q.dtype, obstacle)
    if chosen == "reference":
        return reference.block_attention(
            q, k_cache, v_cache, k_block, v_block, length,
            first=first, parents=parents, scale=scale, causal=causal, window=window, ring=ring,
        )  # fmt: skip
    rule = rule_of(q, k_cache, first, scale=scale, causal=causal, window=window, ring=ring)
    arguments = (q, k_cache, v_cache, k_block, v_block, length)
    return gradient.attend((rule, chosen == "interpret"), arguments, first)
