"""Inputs on which kernel and reference are compared, here in miniature and on a card in full."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.block_attention import gpu
from pallas_kernels.block_attention.gpu_rows import rule_of


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of the arguments (one letter each, as in the operation) and what is asked for.

    lengths: of the blocks; their number is R.
    each: blocks of a context.
    first: where each block's context begins; None for position 0.
    """

    name: str
    lengths: tuple[int, ...]
    T: int = 16
    N: int = 4
    K: int = 2
    S: int = 96
    H: int = 32
    causal: bool = True
    window: int | None = None
    ring: bool = False
    first: tuple[int, ...] | None = None
    each: int = 1
    scale: float = 0.2

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the operation."""
        first = None if self.first is None else jnp.asarray(self.first, jnp.int32)
        return {
            "first": first, "scale": self.scale, "causal": self.causal, "window": self.window,
            "ring": self.ring,
        }  # fmt: skip

    def arguments(self, dtype: DTypeLike, seed: int, junk: float) -> tuple[Array, ...]:
        """q, caches, block and lengths; slots that hold nothing below a row's length are `junk`."""
        rng = np.random.default_rng(seed)
        R = len(self.lengths)
        B = R // self.each

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32)

        q = normal(R, self.T, self.N, self.H)
        caches = [normal(B, self.K, self.S, self.H) for _ in range(2)]
        blocks = [normal(R, self.T, self.K, self.H) for _ in range(2)]
        longest = np.reshape(self.lengths, (B, self.each)).max(1)
        for row, length in enumerate(longest):
            for cache in caches:
                cache[row, :, length:] = junk
        arrays = (jnp.asarray(x, dtype) for x in (q, *caches, *blocks))
        return *arrays, jnp.asarray(self.lengths, jnp.int32)

    def kernel(self, *arguments: Array, **options: Any) -> Array:
        """The kernel itself, with options of its own."""
        asked = self.options
        first = asked.pop("first")
        rule = rule_of(arguments[0], arguments[1], first, **asked)
        return gpu.block_attention(rule, arguments, first, **options)


SMALL = (
    Case(name="draft", lengths=(0, 1, 40, 96), causal=False),
    Case(name="verify", lengths=(0, 17, 80, 95)),
    Case(name="one_token", lengths=(0, 64, 96), T=1),
    Case(name="group_of_3", lengths=(5, 96), N=6, causal=False),
    Case(name="one_head", lengths=(33, 2), N=8, K=1),
    Case(name="window", lengths=(0, 30, 96), window=20),
    Case(name="window_both_ways", lengths=(3, 70), window=9, causal=False),
    Case(name="ring", lengths=(0, 50, 96, 1000), window=64, ring=True, S=80),
    Case(name="ring_one_token", lengths=(11, 333), window=64, ring=True, S=80, T=1),
    Case(name="chunk", lengths=(0, 90), T=70),
    Case(name="chunk_window", lengths=(40, 90), T=70, window=33),
    Case(name="chunk_ring", lengths=(40, 500), T=70, window=64, ring=True, S=80),
    Case(name="documents", lengths=(60, 96), first=(21, 90)),
    # Draft training: anchors in any order over two packed rows.
    Case(
        name="anchors",
        lengths=(33, 0, 95, 7, 64, 12),
        first=(21, 0, 40, 0, 64, 3),
        each=3,
        causal=False,
    ),
)
"""For the interpreter: every branch, no shape that a tile divides."""

SERVED = (
    # Anchors of a training row, in no order.
    Case(name="training", lengths=tuple(17 * i % 61 * 50 for i in range(32)), each=32, N=32, K=8,
         H=128, S=3072, causal=False),
    Case(name="draft", lengths=(1024, 4000, 17), N=32, K=8, H=128, S=4112, causal=False),
    Case(name="qwen_verify", lengths=(1024, 4000, 0), N=16, K=4, H=256, S=4112),
    Case(name="qwen_narrow", lengths=(1024, 4000, 0), N=16, K=4, H=256, S=4112, T=8),
    Case(name="qwen_plain", lengths=(1024, 4000, 1), N=16, K=4, H=256, S=4112, T=1),
    Case(name="gemma_sliding", lengths=(1024, 4000, 3), N=8, K=2, H=256, S=528, window=512,
         ring=True),
    Case(name="gemma_sliding_plain", lengths=(1024, 99), N=8, K=2, H=256, S=513, window=512,
         ring=True, T=1),
    Case(name="gemma_full", lengths=(1024, 4000, 3), N=8, K=2, H=512, S=4112),
    Case(name="gemma_full_narrow", lengths=(1024, 4000, 3), N=8, K=2, H=512, S=4112, T=8),
    Case(name="gemma_full_plain", lengths=(1024, 4000), N=8, K=2, H=512, S=4112, T=1),
    Case(name="gemma_e2b_full", lengths=(1024, 4000), N=8, K=1, H=512, S=4112),
    Case(name="qwen_prefill", lengths=(1024, 0), N=16, K=4, H=256, S=4112, T=512),
    Case(name="gemma_prefill", lengths=(1024, 0), N=8, K=2, H=256, S=528, T=512, window=512,
         ring=True),
)  # fmt: skip
"""Heads of the published models: for a card."""
