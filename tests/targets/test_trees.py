"""A node of a drafted tree is the last token of its branch, as if that had been decoded alone."""

import numpy as np
import pytest

from mmflash_jax.layers.tree import TreeCache
from tests.targets.meaning import assert_same_meaning, logical
from tests.targets.passes import block_pass, commit, every_layer, prefill
from tests.targets.prompts import TEXT_IDS, make_prompt
from tests.targets.trees import branch, paths, random_parents
from tests.tolerances import STATE, assert_close

NODES = 12
# Shorter and longer than the window of 8, and over two turns of a ring.
LENGTHS = (3, 17, 41)


def start(loaded, lengths, *, block=16, shapes=None):
    """A cache after random prompts; equal lengths have equal prompts."""
    prompts = [make_prompt(loaded.target, *(shapes or {}).get(n, (n,)), seed=n) for n in lengths]
    length = np.array([len(prompt.ids) for prompt in prompts])
    shift = np.array([prompt.rope_shift for prompt in prompts])
    cache = prefill(
        loaded.target, loaded.params, prompts, [32, 32], capacity=96, block=block, capture=()
    ).cache
    return cache, length, shift


def test_every_node_equals_its_branch_decoded_as_a_chain(standard):
    """Logits, features of every layer, and the cache after keeping the path to that node.

    One row for each node of each of three trees; the chain's row holds the node's branch, the
    tree's row commits it.
    """
    rng = np.random.default_rng(0)
    trees = random_parents(rng, len(LENGTHS), NODES)
    assert len({tuple(tree) for tree in trees[:, 1:]}) == len(LENGTHS), "ragged"
    drafts = rng.integers(0, TEXT_IDS, trees.shape)
    parents, ids = np.repeat(trees, NODES, 0), np.repeat(drafts, NODES, 0)
    tips = np.tile(np.arange(NODES), len(LENGTHS))
    lengths = np.repeat(LENGTHS, NODES).tolist()
    path, keep = paths(parents, tips, junk=NODES - 1)
    chains = np.where(np.arange(NODES) < keep[:, None], np.take_along_axis(ids, path, 1), 7)
    # An image in the longest prompt: with M-RoPE positions are shifted against indices.
    side = standard.target.image_side
    shapes = {41: (5, (2 * side, 3 * side), 30)}
    cache, length, shift = start(standard, lengths, shapes=shapes)
    capture = every_layer(standard.target)

    def run(ids, **tree):
        return block_pass(
            standard.target, standard.params, ids, cache, length, shift, capture=capture, **tree
        )

    logits, features, tree = run(ids, parents=parents)
    wanted_logits, wanted_features, chain = run(chains)
    assert isinstance(tree, TreeCache)
    rows = np.arange(len(tips))
    assert_close(logits[rows, tips], wanted_logits[rows, keep - 1], STATE, "logits")
    assert_close(features[rows, tips], wanted_features[rows, keep - 1], STATE, "features")
    got = logical(
        standard.target, standard.params, commit(standard.target, tree, keep, path), length + keep
    )
    wanted = logical(
        standard.target, standard.params, commit(standard.target, chain, keep), length + keep
    )
    for row in rows:
        assert_same_meaning(got[row], wanted[row], f"tree {row // NODES}, node {tips[row]}")


@pytest.mark.parametrize("nodes", [16, 5])
def test_trees_and_chains_take_turns(standard, nodes):
    """Rounds of trees, chains and frozen rows against the kept tokens one by one; a tree may be
    narrower than the block that the caches are laid out for."""
    rng = np.random.default_rng(nodes)
    cache, length, shift = start(standard, LENGTHS)
    plain, at, _ = start(standard, LENGTHS, block=1)
    target, params = standard.target, standard.params
    for turn in range(5):
        ids = rng.integers(0, TEXT_IDS, (3, nodes))
        if turn == 2:
            path = np.tile(np.arange(nodes), (3, 1))
            keep = rng.integers(1, nodes + 1, 3)
            _, _, cache = block_pass(target, params, ids, cache, length, shift)
            cache = commit(target, cache, keep)
        else:
            parents = random_parents(rng, 3, nodes)
            path, keep = paths(parents, rng.integers(0, nodes, 3))
            keep[turn % 3] = 0 if turn in (1, 3) else keep[turn % 3]
            _, _, cache = block_pass(target, params, ids, cache, length, shift, parents=parents)
            cache = commit(target, cache, keep, path)
        length = length + keep
        for place in range(keep.max()):
            more = (place < keep).astype(np.int32)
            token = ids[np.arange(3), path[:, place]]
            _, _, plain = block_pass(target, params, token[:, None], plain, at, shift)
            plain, at = commit(target, plain, more), at + more
    np.testing.assert_array_equal(length, at)
    got, wanted = (logical(target, params, one, length) for one in (cache, plain))
    for row in range(3):
        assert_same_meaning(got[row], wanted[row], f"row {row}")


def test_a_path_ends_in_the_last_slot_of_a_full_cache(standard):
    """Nodes past the end of the cache may be accepted: only depth counts there."""
    rng = np.random.default_rng(2)
    length, shift = np.array([94]), np.zeros(1, int)
    prompt = make_prompt(standard.target, 94, seed=1)
    # Slot 96 is past the end; the branch goes over the last nodes of the block.
    parents = np.array([[0, 0, 0, 0, 0, 0, 0, 0]], np.int32)
    ids = rng.integers(0, TEXT_IDS, parents.shape)
    target, params = standard.target, standard.params

    def full():
        return prefill(target, params, [prompt], [94], capacity=96, capture=()).cache

    _, _, tree = block_pass(target, params, ids, full(), length, shift, parents=parents)
    path, keep = paths(parents, np.array([7]))
    _, _, chain = block_pass(target, params, ids[:, branch(parents[0], 7)], full(), length, shift)
    got = logical(target, params, commit(target, tree, keep, path), length + keep)
    wanted = logical(target, params, commit(target, chain, keep), length + keep)
    assert_same_meaning(got[0], wanted[0], "full cache")
