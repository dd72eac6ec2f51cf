"""The gated delta rule in the forms that serving needs, and the commit of a block.

Yang et al., "Gated Delta Networks" (arXiv 2412.06464); the layer around it follows
transformers 5.24 `models/qwen3_5/modeling_qwen3_5.py`.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.choose import Kernels, implementation
from pallas_kernels.gated_delta import gpu, reference
from pallas_kernels.gated_delta.reference import (
    commit_gated_delta,
    convolve,
    fold_pending,
    from_ring,
    gated_delta_block,
    gated_delta_chunked,
    gated_delta_sequential,
    gates,
    queries_keys_values,
    to_ring,
)
from pallas_kernels.gated_delta.tree import gated_delta_tree

__all__ = [
    "commit_gated_delta",
    "convolve",
    "fold_pending",
    "from_ring",
    "gated_delta_block",
    "gated_delta_chunked",
    "gated_delta_sequential",
    "gated_delta_step",
    "gated_delta_tree",
    "gates",
    "queries_keys_values",
    "to_ring",
]


def gated_delta_step(
    ring: Float[Array, "B slots channels"],
    projected: Float[Array, "B T width"],
    kernel: Float[Array, "taps channels"],
    A_log: Float[Array, " vh"],
    dt_bias: Float[Array, " vh"],
    state: Float[Array, "B vh kd vd"],
    update: Float[Array, "B vh P vd"],
    G: Float[Array, "B vh P"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    pending: Int[Array, " B"],
    *,
    key_heads: int,
    kernels: Kernels = "reference",
) -> tuple[
    Float[Array, "B T vh vd"],
    Float[Array, "B vh kd vd"],
    Float[Array, "B vh P vd"],
    Float[Array, "B vh P"],
    Float[Array, "B slots channels"],
]:
    """Fold in what was accepted of the last block, then run the next block of `T` tokens.

    `projected` is a layer's joined projection of the new tokens: the convolution's inputs in its
    first `channels` columns, write strengths and decays (`b`, then `a`) in its last `2 vh`; what
    lies between is not read. `ring` holds the convolution's inputs before position `length`.
    `state` is the state before the last block, `update` and `G` are that block's records: its first
    `pending` tokens, at positions `length - pending ..`, count. Blocks have at most `P` tokens.

    Results: outputs in the dtype of `ring`, the state before the new block, the new block's records
    (zero from `T` on), and the ring with the first `count` new tokens. The ring needs
    `taps - 1 + 2 P` slots. The state is read once and written once.

    Raises:
        ValueError: more tokens than records, or a projection that is too narrow.
        KernelError: `kernels` names a kernel that cannot run here.
    """
    T, width, records = *projected.shape[1:], update.shape[2]
    if records < T:
        raise ValueError(
            f"gated_delta_step: a block of {T} tokens needs as many records; the cache has records"
            f" of {records}"
        )
    if width < (needed := ring.shape[2] + 2 * state.shape[1]):
        raise ValueError(
            f"gated_delta_step: a projection of {width} columns is narrower than the {needed} of"
            " convolution inputs and gates"
        )
    arguments = (
        ring, projected, kernel, A_log, dt_bias, state, update, G, length, count, pending,
    )  # fmt: skip
    obstacle = None if kernels == "reference" else gpu.obstacle(ring, kernel, state, update)
    chosen = implementation("gated_delta_step", kernels, ring.dtype, obstacle)
    if chosen == "reference":
        return reference.gated_delta_step(*arguments, key_heads=key_heads)
    return gpu.gated_delta_step(*arguments, key_heads=key_heads, interpret=chosen == "interpret")
