"""A verify step of the gated delta rule over a tree of drafts: every node continues its branch.

The closed form of a block needs no order, only who comes before whom: with "an ancestor of" in
place of "before" each node's output is that of its branch decoded alone, and so are the records
along a branch. Keeping a branch therefore keeps its records, in order, as those of a chain.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.choose import Kernels, implementation
from pallas_kernels.gated_delta.reference import (
    fold_pending,
    from_ring,
    gated_delta_block,
    gates,
    queries_keys_values,
)
from pallas_kernels.tree import TREE, ancestors_of


def convolve_tree(
    rows: Float[Array, "B R channels"],
    kernel: Float[Array, "taps channels"],
    parents: Int[Array, "B T"],
) -> Float[Array, "B T channels"]:
    """`convolve` along branches: `taps - 1` rows before the tree, then a row for each node."""
    before = kernel.shape[0] - 1
    # Every row's predecessor: in the order of time before the tree, in it the parent; the root
    # follows the last row before it.
    inside = jnp.where(jnp.arange(parents.shape[1]) > 0, before + parents, before - 1)
    chain = jnp.broadcast_to(jnp.arange(-1, before - 1), (len(parents), before))
    previous = jnp.concatenate([chain, inside], axis=1)
    at = jnp.broadcast_to(before + jnp.arange(parents.shape[1]), parents.shape)
    found = [at]
    for _ in range(before):
        found.append(jnp.take_along_axis(previous, found[-1], axis=1))
    wide, kernel = rows.astype(jnp.float32), kernel.astype(jnp.float32)
    mixed = jnp.zeros((), jnp.float32)
    for tap, index in enumerate(reversed(found)):
        mixed = mixed + jnp.take_along_axis(wide, index[..., None], axis=1) * kernel[tap]
    return jax.nn.silu(mixed).astype(rows.dtype)


def gated_delta_tree(
    ring: Float[Array, "B slots channels"],
    new: Float[Array, "B T channels"],
    kernel: Float[Array, "taps channels"],
    a: Float[Array, "B T vh"],
    b: Float[Array, "B T vh"],
    A_log: Float[Array, " vh"],
    dt_bias: Float[Array, " vh"],
    state: Float[Array, "B vh kd vd"],
    update: Float[Array, "B vh P vd"],
    G: Float[Array, "B vh P"],
    length: Int[Array, " B"],
    pending: Int[Array, " B"],
    parents: Int[Array, "B T"],
    *,
    key_heads: int,
    kernels: Kernels = "reference",
) -> tuple[
    Float[Array, "B T vh vd"],
    Float[Array, "B vh kd vd"],
    Float[Array, "B vh T vd"],
    Float[Array, "B vh T"],
]:
    """`gated_delta_step` for a tree: results by node, the running decay along each branch.

    `ring` holds the convolution's inputs before position `length` only; `new` are those of the
    nodes. There is no kernel for trees: "auto" takes this reference and says so.

    Raises:
        KernelError: `kernels` names a kernel.
    """
    implementation("gated_delta_step", kernels, ring.dtype, TREE)
    taps = kernel.shape[0]
    state = fold_pending(ring, kernel, state, update, G, length, pending, key_heads=key_heads)
    rows = jnp.concatenate([from_ring(ring, length - (taps - 1), taps - 1), new], axis=1)
    q, k, v = queries_keys_values(convolve_tree(rows, kernel, parents), key_heads, state)
    out, update, G = gated_delta_block(
        q, k, v, *gates(a, b, A_log, dt_bias), state, ancestors_of(parents)
    )
    return out.astype(ring.dtype), state, update, G
