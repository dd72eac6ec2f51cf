"""Every target against transformers on tiny random checkpoints, fp32: text.

Prompts are longer than the sliding windows of the tiny Gemma 4 models.
"""

import numpy as np
import pytest

from tests.targets import reference
from tests.targets.passes import block_pass, commit, every_layer, prefill
from tests.targets.prompts import make_prompt
from tests.tolerances import MODEL, assert_close


def assert_matches(logits, features, wanted, here=slice(None)):
    """Logits and the output of every layer against transformers."""
    assert_close(logits, wanted.logits[here], MODEL, "logits")
    for index, got in enumerate(np.split(features, len(wanted.layers), axis=-1)):
        assert_close(got, wanted.layers[index][here], MODEL, f"layer {index}")


def test_logits_and_every_layer_match_transformers(loaded):
    """A14: feature i is the raw output of layer i, the last one before the final norm. A10: rows
    of ragged lengths in one right-padded batch, in one chunk."""
    prompts = [make_prompt(loaded.target, n, seed=n) for n in (41, 1, 18)]
    passed = prefill(loaded.target, loaded.params, prompts, [48], capacity=64)
    for row, prompt in enumerate(prompts):
        wanted = reference.run(loaded.model, prompt)
        assert_matches(passed.logits[row], passed.features[row], wanted)


def test_captured_layers_come_in_the_asked_order(standard):
    """A14: not sorted, last layer included, nothing captured without a request."""
    prompt = make_prompt(standard.target, 9, seed=0)
    wanted = reference.run(standard.model, prompt).layers
    passed = prefill(standard.target, standard.params, [prompt], [9], capacity=16, capture=(3, 0))
    assert_close(passed.features[0], np.concatenate([wanted[3], wanted[0]], -1), MODEL)
    passed = prefill(standard.target, standard.params, [prompt], [9], capacity=16, capture=())
    assert passed.features[0].shape == (9, 0)


@pytest.mark.parametrize("widths", [[16, 16, 16], [5, 24, 5, 14]])
def test_chunks_give_what_one_pass_gives(standard, widths):
    """A20: chunk edges anywhere, rows that end inside, at the edge of and before a chunk."""
    prompts = [make_prompt(standard.target, n, seed=n) for n in (41, 1, 16, 30)]
    passed = prefill(standard.target, standard.params, prompts, widths, capacity=64)
    for row, prompt in enumerate(prompts):
        wanted = reference.run(standard.model, prompt)
        assert_matches(passed.logits[row], passed.features[row], wanted)


def test_prefill_then_blocks_match_one_full_pass(loaded):
    """Blocks of 16 with any number of tokens kept, on rows that stand at different places."""
    target, params = loaded.target, loaded.params
    whole = [make_prompt(target, 90, seed=n) for n in (1, 2)]
    wanted = [reference.run(loaded.model, prompt) for prompt in whole]
    starts = [make_prompt(target, n, seed=s) for s, n in ((1, 20), (2, 7))]
    assert all((s.ids == w.ids[: len(s.ids)]).all() for s, w in zip(starts, whole, strict=True))
    cache = prefill(target, params, starts, [24], capacity=96).cache
    length = np.array([20, 7])
    shift = np.zeros(2, np.int32)
    for keep in ([16, 5], [1, 16], [0, 9], [7, 1], [16, 16]):
        ids = np.stack([w.ids[n : n + 16] for w, n in zip(whole, length, strict=True)])
        logits, features, cache = block_pass(
            target, params, ids, cache, length, shift, capture=every_layer(target)
        )
        for row in range(2):
            here = slice(length[row], length[row] + 16)
            assert_matches(logits[row], features[row], wanted[row], here)
        cache = commit(target, cache, np.array(keep))
        length = length + keep
