"""Trees of drafted tokens, given by the parent of each node.

Nodes are in topological order: node 0 is the root (the anchor), a parent comes before its
children, `parents[:, 0]` is not read. A node sees its ancestors and itself, so it stands for the
last token of one branch. A chain is the tree in which the parent of node i is i - 1.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

TREE = "the drafts form a tree"
"""Why a kernel cannot run: all of them are written for chains."""


def ancestors_of(parents: Int[Array, "B U"]) -> Bool[Array, "B U U"]:
    """Whether node j (last axis) is node i or an ancestor of it.

    Each squaring of "node or parent" doubles the reach, so depth costs a logarithm.
    """
    size = parents.shape[1]
    node = jnp.arange(size)
    above = (parents[..., None] == node) & (node > 0)[:, None]
    reach = (above | jnp.eye(size, dtype=bool)).astype(jnp.float32)
    for _ in range((size - 1).bit_length()):
        # Products of zeros and ones with at most `size` terms: exact in any precision used.
        reach = (reach @ reach > 0).astype(jnp.float32)
    return reach > 0


def depths_of(ancestors: Bool[Array, "B U U"]) -> Int[Array, "B U"]:
    """Edges between each node and the root."""
    return ancestors.sum(axis=-1, dtype=jnp.int32) - 1
