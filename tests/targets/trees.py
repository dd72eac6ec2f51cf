"""Trees of drafts for tests, and the chain that each of their nodes ends."""

import numpy as np


def random_parents(rng: np.random.Generator, batch: int, nodes: int) -> np.ndarray:
    """`[B, nodes]`: another shape in every row; the root's own entry is junk that nobody reads."""
    parents = np.stack([rng.integers(0, np.maximum(np.arange(nodes), 1)) for _ in range(batch)])
    # Uniform parents give shallow trees; every second row prefers late ones.
    late = np.maximum(np.arange(nodes) - 1 - rng.integers(0, 2, (batch, nodes)), 0)
    parents[::2] = late[::2]
    parents[:, 0] = rng.integers(-1, nodes, batch)
    return parents.astype(np.int32)


def branch(parents: np.ndarray, node: int) -> list[int]:
    """Nodes from the root to `node` of one row's tree."""
    nodes = [node]
    while nodes[-1]:
        nodes.append(int(parents[nodes[-1]]))
    return nodes[::-1]


def paths(parents: np.ndarray, tips: np.ndarray, junk: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Paths `[B, T]` to one node a row, filled up with `junk`, and how many of its nodes count."""
    filled = np.full(parents.shape, junk, np.int32)
    count = np.zeros(len(tips), np.int32)
    for row, tip in enumerate(tips):
        nodes = branch(parents[row], tip)
        filled[row, : len(nodes)], count[row] = nodes, len(nodes)
    return filled, count
