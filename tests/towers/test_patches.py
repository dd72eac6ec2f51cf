"""What image towers share."""

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.towers.patches import attend, patch_grid


def test_merge_block_order():
    """Two images of 4 x 6 and 2 x 2 patches in blocks of 2 x 2."""
    row, column = patch_grid(24, jnp.array([6, 2]), 2)
    np.testing.assert_array_equal(row[0][:12], [0, 0, 1, 1] * 3)
    np.testing.assert_array_equal(column[0][:12], [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5])
    np.testing.assert_array_equal(row[0][12:], row[0][:12] + 2)
    np.testing.assert_array_equal(column[0][12:], column[0][:12])
    np.testing.assert_array_equal(row[1][:6], [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(column[1][:6], [0, 1, 0, 1, 0, 1])


def test_scale_multiplies_the_scores():
    q, k, v = (
        jax.random.normal(key, (1, 6, 2, 4)) for key in jax.random.split(jax.random.key(1), 3)
    )
    mask = jnp.ones((1, 6), bool)
    np.testing.assert_allclose(
        attend(q, k, v, mask, scale=0.25), attend(q / 4, k, v, mask, scale=1.0), atol=1e-6
    )


def test_chunked_attention_equals_whole_attention():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 24, 2, 8)) for key in keys)
    mask = jnp.arange(24) < jnp.array([[24], [13]])
    whole = attend(q, k, v, mask, scale=8**-0.5)
    scores = q.shape[0] * q.shape[2] * 24 * 24
    # 24 queries in chunks of 5 leave a chunk that is padded.
    for limit in (scores // 2, scores * 5 // 24, 1):
        parts = attend(q, k, v, mask, scale=8**-0.5, max_scores=limit)
        np.testing.assert_allclose(parts, whole, atol=1e-6)
