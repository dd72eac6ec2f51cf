"""Rotary position embedding: plain, proportional, interleaved M-RoPE and 2-D of image towers."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def inverse_frequencies(theta: float, width: int) -> np.ndarray:
    """`theta^(-2i / width)` for i in 0 .. width/2 - 1, fp32 `[width / 2]`."""
    return (theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)).astype(np.float32)


def rotary_angles(
    position: Int[Array, "*batch"], theta: float, width: int
) -> Float[Array, "*batch half"]:
    """fp32 angles of 1-D positions for the first `width` dimensions of a head."""
    return position[..., None].astype(jnp.float32) * inverse_frequencies(theta, width)


def proportional_angles(
    position: Int[Array, "*batch"], theta: float, width: int, share: float
) -> Float[Array, "*batch half"]:
    """fp32 angles for a whole head of which only the first `share` of the frequencies turn.

    The frequencies are those of the whole head; the others are zero (transformers 5.24
    `_compute_proportional_rope_parameters`). A share of 1 gives ordinary rotary embedding.
    """
    frequencies = inverse_frequencies(theta, width)
    frequencies[int(share * width // 2) :] = 0.0
    return position[..., None].astype(jnp.float32) * frequencies


def mrope_angles(
    position: Int[Array, "3 B T"], theta: float, width: int, section: tuple[int, int, int]
) -> Float[Array, "B T half"]:
    """fp32 angles of (time, row, column) positions, axes interleaved over the frequencies.

    Frequency `i` takes the row axis when `i % 3 == 1` and `i < 3 * section[1]`, the column axis
    when `i % 3 == 2` and `i < 3 * section[2]`, else the time axis (transformers 5.24
    `apply_interleaved_mrope`). Equal axes give ordinary rotary embedding.
    """
    i = np.arange(width // 2)
    axis = np.zeros(width // 2, np.int32)
    axis[(i % 3 == 1) & (i < 3 * section[1])] = 1
    axis[(i % 3 == 2) & (i < 3 * section[2])] = 2
    angles = rotary_angles(position, theta, width)
    return jnp.take_along_axis(angles, jnp.asarray(axis)[None, None, None, :], axis=0)[0]
