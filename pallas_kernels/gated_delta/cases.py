"""Inputs on which kernel and reference are compared, here in miniature and on a card in full."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of the arguments, and of each row its length and how much of it is pending.

    spread: of the keys around one common key; where they are alike the formulas differ most.
    """

    name: str
    lengths: tuple[int, ...]
    pending: tuple[int, ...]
    T: int = 16
    key_heads: int = 2
    value_heads: int = 4
    kd: int = 32
    vd: int = 16
    spread: float = 1.0

    def arguments(self, dtype: DTypeLike, seed: int) -> tuple[Array, ...]:
        """Arguments of `gated_delta_step`, in order; records of rejected tokens are large."""
        rng = np.random.default_rng(seed)
        B, T, vh, taps = len(self.lengths), self.T, self.value_heads, 4
        channels = 2 * self.key_heads * self.kd + vh * self.vd

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32)

        ring = normal(B, 1, channels) + self.spread * normal(B, 2 * T + taps - 1, channels)
        update = normal(B, vh, T, self.vd)
        for row, keep in enumerate(self.pending):
            update[row, :, keep:] = 1e6
        # Half-lives from less than a token to thousands of tokens, as trained models have.
        G = np.cumsum(-np.exp(rng.uniform(-8, 0, (B, vh, T))), axis=-1).astype(np.float32)
        A_log, dt_bias = rng.uniform(-6, 0, vh), rng.uniform(-2, 1, vh)
        state = normal(B, vh, self.kd, self.vd)
        low = (ring, normal(taps, channels), normal(B, T, vh), normal(B, T, vh))
        exact = (A_log, dt_bias, state, update, G)
        return (
            *(jnp.asarray(x, dtype) for x in low),
            *(jnp.asarray(x, jnp.float32) for x in exact),
            *(jnp.asarray(x, jnp.int32) for x in (self.lengths, self.pending)),
        )


SMALL = (
    Case(name="block", lengths=(40, 2, 0, 33), pending=(5, 2, 0, 16)),
    Case(name="like_keys", lengths=(40, 20), pending=(16, 1), spread=1e-2),
    Case(name="short_block", lengths=(9, 100), pending=(4, 6), T=6),
    Case(name="one_token", lengths=(0, 1, 77), pending=(0, 1, 1), T=1),
    Case(name="own_keys", lengths=(50,), pending=(3,), key_heads=3, value_heads=3),
)
"""For the interpreter."""

SERVED = (
    Case(name="delta_block", lengths=(1024, 33, 0, 4000), pending=(6, 16, 0, 1), key_heads=16,
         value_heads=32, kd=128, vd=128),
    Case(name="delta_like_keys", lengths=(1024,), pending=(6,), key_heads=16, value_heads=32,
         kd=128, vd=128, spread=1e-2),
    Case(name="delta_plain", lengths=(1024, 33, 0, 4000), pending=(1, 1, 0, 1), key_heads=16,
         value_heads=32, kd=128, vd=128, T=1),
)  # fmt: skip
"""Heads of Qwen3.5-4B: for a card."""
