"""Targets against transformers on prompts with images, and the rule of positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.targets import reference
from tests.targets.passes import block_pass, every_layer, prefill
from tests.targets.prompts import make_prompt
from tests.targets.test_conformance import assert_matches
from tests.tolerances import MODEL, assert_close

# Rows and columns of patches: wide, tall, one merged token, several images with text between.
PARTS = {
    "wide": (3, (4, 10), 6),
    "tall at the start": ((14, 2), 5),
    "single token at the end": (4, (2, 2)),
    "two": (2, (6, 4), 1, (2, 8), 9),
    "three": (1, (2, 6), 2, (6, 6), 1, (4, 2), 3),
    "text only": (12,),
}


@pytest.fixture(scope="module")
def prompts(standard):
    return {
        name: make_prompt(standard.target, *parts, seed=place)
        for place, (name, parts) in enumerate(PARTS.items())
    }


def test_prompts_with_images_match_transformers(standard, prompts):
    """B13: spans and order of several images of different sizes, in one padded batch."""
    passed = prefill(standard.target, standard.params, list(prompts.values()), [40], capacity=64)
    for row, prompt in enumerate(prompts.values()):
        wanted = reference.run(standard.model, prompt)
        assert_matches(passed.logits[row], passed.features[row], wanted)


@pytest.mark.parametrize("width", [8, 13])
def test_chunk_edges_inside_an_image_change_nothing(standard, prompts, width):
    """B15: edges cut image spans."""
    some = [prompts["three"], prompts["wide"]]
    widths = [width] * -(-max(len(p.ids) for p in some) // width)
    passed = prefill(standard.target, standard.params, some, widths, capacity=64)
    for row, prompt in enumerate(some):
        wanted = reference.run(standard.model, prompt)
        assert_matches(passed.logits[row], passed.features[row], wanted)


def test_blocks_after_an_image_use_the_shifted_positions(standard):
    """Generated tokens stand at index + shift on all axes; caches count plain indices."""
    whole = [make_prompt(standard.target, 2, (6, 4), 40, seed=s) for s in (1, 2)]
    starts = [make_prompt(standard.target, 2, (6, 4), 7, seed=s) for s in (1, 2)]
    for start, one in zip(starts, whole, strict=True):
        # Patches are drawn before the text behind them, so the common part is the same.
        assert (start.ids == one.ids[: len(start.ids)]).all()
        assert start.rope_shift == one.rope_shift
    cache = prefill(standard.target, standard.params, starts, [16], capacity=64).cache
    length = np.array([len(p.ids) for p in starts])
    shift = np.array([p.rope_shift for p in starts])
    ids = np.stack([w.ids[n : n + 16] for w, n in zip(whole, length, strict=True)])
    logits, features, _ = block_pass(
        standard.target,
        standard.params,
        ids,
        cache,
        length,
        shift,
        capture=every_layer(standard.target),
    )
    for row, prompt in enumerate(whole):
        here = slice(length[row], length[row] + 16)
        assert_matches(logits[row], features[row], reference.run(standard.model, prompt), here)


def test_mrope_positions_are_those_of_transformers(qwen):
    for name, parts in PARTS.items():
        prompt = make_prompt(qwen.target, *parts, seed=0)
        given = reference.inputs(qwen.model, prompt)
        types = torch.from_numpy(prompt.media_idx >= 0)[None].int()
        wanted, delta = qwen.model.model.get_rope_index(
            given["input_ids"], types, image_grid_thw=given.get("image_grid_thw")
        )
        np.testing.assert_array_equal(prompt.positions, wanted[:, 0].numpy(), err_msg=name)
        assert prompt.rope_shift == int(delta), name


def test_an_image_changes_the_logits(standard):
    """B01: the same ids with another picture, or with placeholder embeddings, differ."""
    prompts = [make_prompt(standard.target, 3, (4, 4), 5, seed=s) for s in (1, 2)]
    prompts[1].ids[:] = prompts[0].ids
    passed = prefill(standard.target, standard.params, prompts, [16], capacity=16)
    assert np.abs(passed.logits[0][-1] - passed.logits[1][-1]).max() > 1e-2
    before = slice(0, 3)
    assert_close(passed.logits[0][before], passed.logits[1][before], MODEL)


def test_placeholder_ids_are_never_looked_up(standard):
    """B05: an id outside the table at a media place gives the same embeddings."""
    prompt = make_prompt(standard.target, 3, (4, 4), 5, seed=1)
    media = np.random.default_rng(0).normal(size=(4, standard.target.config.hidden_size))
    media_idx = prompt.media_idx[None]
    outside = np.where(media_idx >= 0, 10**6, prompt.ids[None])
    one, two = (
        jax.tree.leaves(
            standard.target.embed(standard.params, *map(jnp.asarray, (ids, media, media_idx)))
        )
        for ids in (prompt.ids[None], outside)
    )
    for part, other in zip(one, two, strict=True):
        np.testing.assert_array_equal(part, other)
    # The stream comes first, whatever else a family embeds; media rows enter it unscaled.
    np.testing.assert_allclose(one[0][0, 3:7], media, rtol=1e-6)
