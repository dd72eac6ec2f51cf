"""Growing a tree of drafts, best branches first (EAGLE-2, Li et al., arXiv 2406.16858).

Level by level the `top_k` likeliest nodes are run, each of which proposes its `top_k` likeliest
tokens; a node is as likely as all tokens of its branch together. Of all proposed nodes the
likeliest make the tree. Shapes are static: they depend on width, depth and size alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class Level:
    """Nodes that are run together, `W` of them in every row.

    number: 0 for the anchor alone, 1 for its children.
    ids: int32 `[B, W]`.
    above: int32 `[B, W]`, which node of the level before is the parent; zeros at level 0.
    """

    number: int
    ids: Int[Array, "B W"]
    above: Int[Array, "B W"]


def most_nodes(top_k: int, depth: int) -> int:
    """Nodes that are proposed in all, the anchor left out."""
    return top_k + (depth - 1) * top_k**2


def grow(
    run: Callable[[Any, Level], tuple[Float[Array, "B W V"], Any]],
    drafted: Any,
    anchor: Int[Array, " B"],
    *,
    nodes: int,
    top_k: int,
    depth: int,
) -> tuple[Int[Array, "B nodes"], Int[Array, "B nodes_1"]]:
    """Ids and parents of a `Proposal` of `nodes` drafts; the likeliest come first.

    `run` gives the log-likelihood of every token after each node of a level, and `drafted` for the
    level after it; levels come in order.
    """
    B = anchor.shape[0]
    zero = jnp.zeros((B, 1), jnp.int32)
    level = Level(number=0, ids=anchor[:, None], above=zero)
    # Of the nodes of the level: log-likelihood, and number among all proposed nodes.
    so_far, number = jnp.zeros((B, 1), jnp.float32), zero
    ids, scores, parents = [], [], []
    count = 1
    for step in range(depth):
        likelihood, drafted = run(drafted, level)
        best, found = lax.top_k(likelihood, top_k)
        score = (so_far[..., None] + best).reshape(B, -1)
        ids.append(found.reshape(B, -1).astype(jnp.int32))
        scores.append(score)
        parents.append(jnp.repeat(number, top_k, axis=1))
        so_far, at = lax.top_k(score, top_k)
        level = Level(
            number=step + 1, ids=jnp.take_along_axis(ids[-1], at, axis=1), above=at // top_k
        )
        number = (count + at).astype(jnp.int32)
        count += score.shape[1]
    # A child is at most as likely as its parent and comes after it, and equals stay in order: what
    # is chosen is a tree in topological order.
    _, chosen = lax.top_k(jnp.concatenate(scores, axis=1), nodes)
    place = zero.repeat(count, axis=1)
    place = place.at[jnp.arange(B)[:, None], 1 + chosen].set(1 + jnp.arange(nodes))
    above = jnp.take_along_axis(jnp.concatenate(parents, axis=1), chosen, axis=1)
    tree = jnp.take_along_axis(place, above, axis=1)
    return (
        jnp.take_along_axis(jnp.concatenate(ids, axis=1), chosen, axis=1),
        jnp.concatenate([zero, tree], axis=1),
    )
