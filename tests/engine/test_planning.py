"""Sizes of a server, planned from the caches before anything is compiled."""

import dataclasses

import jax
import numpy as np
import pytest
from PIL import Image

from mmflash_jax.decode.prefill import empty_prompts
from mmflash_jax.decode.records import PatchedImage, Plan
from mmflash_jax.decode.slots import Shape, empty_slots
from mmflash_jax.engine.planning import (
    DoesNotFitError,
    cache_bytes,
    check_memory,
    chunk_sizes,
    image_sizes,
    large_image,
)
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.load import load_target
from tests.drafts import draft_for, two_layer_target

SHAPE = Shape(slots=3, capacity=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return two_layer_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plan(folder):
    target, _ = load_target(folder, "float32")
    return Plan(target, draft_for(folder, block_size=4), ())


def size(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_planned_bytes_are_those_of_the_arrays(plan):
    slots, prefills = cache_bytes(plan, SHAPE)
    assert slots == size(empty_slots(plan, SHAPE))
    one = size(empty_prompts(plan, 1, SHAPE.capacity))
    assert prefills == 2 * (one + 64 * plan.target.config.hidden_size * 4)


def test_what_does_not_fit_is_refused_with_what_would(plan):
    slots, prefills = cache_bytes(plan, SHAPE)
    assert check_memory(plan, SHAPE, slots + prefills) == slots + prefills
    assert check_memory(plan, SHAPE, None) == slots + prefills
    with pytest.raises(DoesNotFitError, match=r"3 rows .* of 64 tokens .*: 2 rows of this length"):
        check_memory(plan, SHAPE, slots + prefills - 1)
    with pytest.raises(DoesNotFitError, match=": 0 rows of this length would fit"):
        check_memory(plan, SHAPE, 1)


def test_every_image_has_a_size(folder, plan):
    """C13: whatever the sides, the processor's patches fit one of the planned sizes."""
    encoder = PromptEncoder.from_checkpoint(folder, plan.target)
    largest = large_image(encoder)
    sizes = image_sizes(largest, 4096, plan.target.image_side)
    assert sizes == tuple(64 * 2**n for n in range(len(sizes)))
    random = np.random.default_rng(0)
    for _ in range(40):
        height, width = random.integers(1, 900, size=2)
        if max(height, width) > 100 * min(height, width):
            continue
        pixels = np.zeros((height, width, 3), np.uint8)
        prompt = encoder.encode(Request(text="x", images=(Image.fromarray(pixels),)))
        assert len(prompt.images[0].patches) <= sizes[-1]


def test_sizes_end_where_a_row_does():
    image = PatchedImage(
        patches=np.zeros((5000, 1), np.float32), rows=50, columns=100, num_tokens=1
    )
    assert image_sizes(image, 10**6, 2)[-1] == 8192
    assert image_sizes(image, 100, 2) == (64, 128, 256, 512)
    small = dataclasses.replace(image, patches=np.zeros((10, 1), np.float32))
    assert image_sizes(small, 10**6, 2) == (64,)
    assert chunk_sizes(8192) == (32, 128, 512)
    assert chunk_sizes(200) == (32, 128)
    assert chunk_sizes(8) == (32,)
