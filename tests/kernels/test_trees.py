"""Operations on trees of drafts: each node against its branch run as a chain."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    KernelError,
    ancestors_of,
    block_attention,
    depths_of,
    gated_delta_step,
    gated_delta_tree,
)
from pallas_kernels.gated_delta.cases import SMALL
from tests.kernels.test_block_attention import LENGTHS, SLOTS, inputs
from tests.targets.trees import branch, random_parents
from tests.tolerances import LAYER, assert_close

NODES = 6


def test_ancestors_and_depths():
    rng = np.random.default_rng(0)
    for nodes in (1, 2, 9, 17):
        parents = random_parents(rng, 3, nodes)
        ancestors = ancestors_of(jnp.asarray(parents))
        depths = depths_of(ancestors)
        for row in range(3):
            for node in range(nodes):
                nodes_above = branch(parents[row], node)
                np.testing.assert_array_equal(
                    np.flatnonzero(np.asarray(ancestors)[row, node]), sorted(nodes_above)
                )
                assert depths[row, node] == len(nodes_above) - 1
    chain = np.arange(-1, 16)[None]
    np.testing.assert_array_equal(ancestors_of(jnp.asarray(chain))[0], np.tri(17, dtype=bool))


@pytest.mark.parametrize(("window", "ring"), [(None, False), (3, False), (7, True)])
@pytest.mark.parametrize("queries", [NODES, 2])
def test_attention_of_a_node_is_that_of_its_branch(window, ring, queries):
    """Windows count depth, not node numbers; queries may be the last nodes only."""
    q, k_cache, v_cache, k, v = inputs(4, 2)
    if ring:
        # Slots of a ring hold real rows whatever the length; the chain reads the same ones.
        k_cache, v_cache = (np.where(np.abs(x) > 1e3, 0.5, x) for x in (k_cache, v_cache))
    attend = jax.jit(
        functools.partial(block_attention, scale=0.3, causal=True, window=window, ring=ring)
    )
    parents = random_parents(np.random.default_rng(4), len(LENGTHS), NODES)
    length = jnp.asarray(np.minimum(LENGTHS, SLOTS))
    got = attend(q[:, -queries:], k_cache, v_cache, k, v, length, parents=jnp.asarray(parents))
    for row in range(len(LENGTHS)):
        one = slice(row, row + 1)
        for place in range(queries):
            nodes = branch(parents[row], NODES - queries + place)
            chain = nodes + [0] * (NODES - len(nodes))
            wanted = attend(
                q[one, chain], k_cache[one], v_cache[one], k[one, chain], v[one, chain],
                length[one],
            )  # fmt: skip
            assert_close(got[row, place], wanted[0, len(nodes) - 1], LAYER, f"{row}, {nodes}")


def apart(case, projected, ring):
    """Inputs of the convolution, write strengths and decays of a joined projection."""
    b, a = jnp.split(projected[..., -2 * case.value_heads :], 2, axis=-1)
    return projected[..., : ring.shape[2]], b, a


@pytest.mark.parametrize("case", SMALL[:4], ids=lambda case: case.name)
def test_a_delta_net_node_continues_its_branch(case):
    """Outputs, and the records that a branch keeps, after a prefix of the last block."""
    ring, projected, kernel, *exact = case.arguments(jnp.float32, 0)
    new, b, a = apart(case, projected, ring)
    length, counts, pending = exact[-3:]
    B, T = projected.shape[:2]
    parents = random_parents(np.random.default_rng(1), B, T)
    A_log, dt_bias, *records = exact[:-3]
    tree = jax.jit(functools.partial(gated_delta_tree, key_heads=case.key_heads))
    step = jax.jit(functools.partial(gated_delta_step, key_heads=case.key_heads))
    out, state, update, G = tree(
        ring, new, kernel, a, b, A_log, dt_bias, *records, length, pending, parents
    )
    for node in range(T):
        chains = [branch(parents[row], node) for row in range(B)]
        index = np.array([nodes + [0] * (T - len(nodes)) for nodes in chains])

        def pick(x, index=index):
            return np.take_along_axis(np.asarray(x), index[..., None], axis=1)

        wanted = step(
            ring, pick(projected), kernel, A_log, dt_bias, *records, length, counts, pending,
        )  # fmt: skip
        assert_close(state, wanted[1], LAYER, "state")
        for row, nodes in enumerate(chains):
            count = len(nodes)
            assert_close(out[row, node], wanted[0][row, count - 1], LAYER, f"row {row}, {nodes}")
            assert_close(update[row][:, nodes], wanted[2][row][:, :count], LAYER, "updates")
            assert_close(G[row][:, nodes], wanted[3][row][:, :count], LAYER, "decay")


def test_a_kernel_by_name_takes_no_tree():
    """Neither operation falls back where a kernel was asked for by name."""
    parents = jnp.zeros((len(LENGTHS), NODES), jnp.int32)
    arrays = [jnp.asarray(x) for x in (*inputs(4, 2), LENGTHS)]
    attend = functools.partial(block_attention, *arrays, scale=0.3)
    with pytest.raises(KernelError, match=r"block_attention.*interpret.*tree.*reference"):
        attend(causal=True, parents=parents, kernels="interpret")
    with pytest.raises(ValueError, match="a tree must be causal"):
        attend(causal=False, parents=parents)
    case = SMALL[0]
    arguments = case.arguments(jnp.float32, 0)
    ring, projected, kernel, *rest, _, pending = arguments
    new, b, a = apart(case, projected, ring)
    parents = jnp.zeros(new.shape[:2], jnp.int32)
    tree: Any = functools.partial(gated_delta_tree, key_heads=case.key_heads, kernels="interpret")
    with pytest.raises(KernelError, match=r"gated_delta_step.*interpret.*tree.*reference"):
        tree(ring, new, kernel, a, b, *rest, pending, parents)
