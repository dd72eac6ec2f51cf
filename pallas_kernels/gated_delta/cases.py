"""Inputs on which kernel and reference are compared, here in miniature and on a card in full."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool

TAPS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of the arguments, and of each row its length and how much of it is pending.

    T: tokens of the last block, and of the new one if `tokens` does not say less.
    counts: of the new tokens those that go into the ring; all where none are given.
    spread: of the keys around one common key; where they are alike the formulas differ most.
    """

    name: str
    lengths: tuple[int, ...]
    pending: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    T: int = 16
    tokens: int | None = None
    key_heads: int = 2
    value_heads: int = 4
    kd: int = 32
    vd: int = 16
    spread: float = 1.0

    @property
    def unread(self) -> Bool[np.ndarray, "B slots"]:
        """Slots of the ring in which nothing is that counts."""
        slots = 2 * self.T + TAPS - 1
        found = np.ones((len(self.lengths), slots), bool)
        for row, (length, keep) in enumerate(zip(self.lengths, self.pending, strict=True)):
            first = max(0, length - keep - (TAPS - 1))
            found[row, np.arange(first, length) % slots] = False
        return found

    def arguments(self, dtype: DTypeLike, seed: int, unused: float = 1e6) -> tuple[Array, ...]:
        """Arguments of `gated_delta_step`, in order; what nothing may read is `unused`: records of
        rejected tokens, slots of the ring, columns of the projection."""
        rng = np.random.default_rng(seed)
        B, T, vh = len(self.lengths), self.T, self.value_heads
        new_tokens = T if self.tokens is None else self.tokens
        channels = 2 * self.key_heads * self.kd + vh * self.vd

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32)

        slots = 2 * T + TAPS - 1
        rows = normal(B, 1, channels) + self.spread * normal(B, slots + new_tokens, channels)
        ring, new = rows[:, :slots], rows[:, slots:]
        ring[self.unread] = unused
        gates = normal(B, new_tokens, 2 * vh)
        between = np.full((B, new_tokens, vh * self.vd), unused)
        projected = np.concatenate([new, between, gates], axis=-1)
        update = normal(B, vh, T, self.vd)
        # Half-lives from less than a token to thousands of tokens, as trained models have.
        G = np.cumsum(-np.exp(rng.uniform(-8, 0, (B, vh, T))), axis=-1).astype(np.float32)
        for row, keep in enumerate(self.pending):
            update[row, :, keep:] = unused
            G[row, :, keep:] = unused if np.isnan(unused) else G[row, :, keep:]
        A_log, dt_bias = rng.uniform(-6, 0, vh), rng.uniform(-2, 1, vh)
        state = normal(B, vh, self.kd, self.vd)
        counts = (new_tokens,) * B if self.counts is None else self.counts
        return (
            *(jnp.asarray(x, dtype) for x in (ring, projected, normal(TAPS, channels))),
            *(jnp.asarray(x, jnp.float32) for x in (A_log, dt_bias, state, update, G)),
            *(jnp.asarray(x, jnp.int32) for x in (self.lengths, counts, self.pending)),
        )


SMALL = (
    Case(name="block", lengths=(40, 2, 0, 33), pending=(5, 2, 0, 16)),
    Case(name="like_keys", lengths=(40, 20), pending=(16, 1), spread=1e-2),
    Case(name="short_block", lengths=(9, 100), pending=(4, 6), T=6),
    Case(name="one_token", lengths=(0, 1, 77, 4), pending=(0, 1, 1, 0), counts=(1, 0, 1, 1), T=1),
    Case(name="wraps", lengths=(35, 30, 69, 52), pending=(16, 16, 15, 16), counts=(16, 0, 3, 9)),
    Case(name="narrow", lengths=(33, 5, 20), pending=(9, 2, 12), counts=(2, 0, 1), tokens=2,
         T=12, vd=32),
    Case(name="own_keys", lengths=(50,), pending=(3,), key_heads=3, value_heads=3),
)  # fmt: skip
"""For the interpreter."""

SERVED = (
    Case(name="delta_block", lengths=(1024, 33, 0, 4000), pending=(6, 16, 0, 1),
         counts=(16, 16, 0, 7), key_heads=16, value_heads=32, kd=128, vd=128),
    Case(name="delta_narrow", lengths=(1024, 33, 0, 4000), pending=(6, 8, 0, 1),
         counts=(8, 8, 0, 7), tokens=8, key_heads=16, value_heads=32, kd=128, vd=128),
    Case(name="delta_one_of_a_block", lengths=(1024, 33, 0, 4000), pending=(6, 16, 0, 1),
         counts=(1, 1, 0, 1), tokens=1, key_heads=16, value_heads=32, kd=128, vd=128),
    Case(name="delta_like_keys", lengths=(1024,), pending=(6,), key_heads=16, value_heads=32,
         kd=128, vd=128, spread=1e-2),
    Case(name="delta_plain", lengths=(1024, 33, 0, 4000), pending=(1, 1, 0, 1), key_heads=16,
         value_heads=32, kd=128, vd=128, T=1),
)  # fmt: skip
"""Heads of Qwen3.5-4B: for a card."""
