"""Inputs on which kernel and reference are compared, here in miniature and on a card in full."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.attention_heads.reference import Slots
from pallas_kernels.norm import Kind, Norm

NORMS: dict[str, tuple[tuple[Kind, bool], ...]] = {
    "none": (),
    "qwen3": (("rounded", True), ("rounded", True)),
    "qwen35": (("zero_centred", True), ("zero_centred", True)),
    "gemma": (("plain", True), ("plain", True), ("plain", False)),
}
"""Kinds of the norms of queries, keys and values, and whether they have weights."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of the arguments (one letter each, as in the operation) and what is asked for.

    starts, counts: of the rows; their number is B. N or K may be 0: no queries, or only queries.
    S: slots of the caches; 0 for none.
    parts: of the projections, with a row that is not read.
    """

    name: str
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    norms: Literal["none", "qwen3", "qwen35", "gemma"]
    T: int = 16
    N: int = 4
    K: int = 2
    H: int = 32
    half: int = 16
    S: int = 96
    gated: bool = False
    ring: bool = False
    parts: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the operation that are no arrays, but the dtype."""
        return {"head_dim": self.H, "gated": self.gated}

    def arguments(self, dtype: DTypeLike, seed: int) -> dict[str, Any]:
        """Arrays by name. Slots of a cache that hold nothing are NaN: they must stay as they are,
        and what is written must not depend on them."""
        rng = np.random.default_rng(seed)
        B, T, H = len(self.starts), self.T, self.H

        def normal(*shape: int) -> Array:
            return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

        def projection(width: int) -> Array | None:
            if not width:
                return None
            if self.parts == 1:
                return normal(1, B * T, width)
            made = rng.standard_normal((self.parts, B * T + 1, width), np.float32)
            made[:, -1] = np.nan
            return jnp.asarray(made)

        widths = {"q": self.N * H * (1 + self.gated), "k": self.K * H, "v": self.K * H}
        given: dict[str, Any] = {name: projection(width) for name, width in widths.items()}
        position = np.asarray(self.starts)[:, None] + np.arange(T)
        frequency = 1e4 ** -(np.arange(self.half) / self.half)
        given["angles"] = jnp.asarray(position[..., None] * frequency, jnp.float32)
        for name, (kind, weighted) in zip("qkv", NORMS[self.norms], strict=False):
            if given[name] is not None:
                given[f"{name}_norm"] = Norm(normal(H) if weighted else None, 1e-6, kind)
        if self.S:
            cache = rng.standard_normal((2, B, self.K, self.S, H), np.float32)
            for row, start in enumerate(self.starts):
                cache[:, row, :, start:] = np.nan
            given["slots"] = Slots(
                k=jnp.asarray(cache[0], dtype),
                v=jnp.asarray(cache[1], dtype),
                start=jnp.asarray(self.starts, jnp.int32),
                count=jnp.asarray(self.counts, jnp.int32),
                ring=self.ring,
            )
        return given


SMALL = (
    Case(name="qwen35", starts=(0, 40, 88), counts=(16, 7, 16), norms="qwen35", gated=True, half=4),
    Case(name="gemma", starts=(0, 75, 1000), counts=(16, 5, 16), norms="gemma", ring=True, S=80),
    Case(name="gemma_reader", starts=(0, 75), counts=(0, 0), norms="gemma", K=0, S=0, parts=2),
    Case(name="draft", starts=(3, 60), counts=(0, 0), norms="qwen3", S=0),
    Case(name="context", starts=(0, 60, 90), counts=(4, 0, 16), norms="qwen3", N=0),
    Case(name="llama", starts=(11,), counts=(16,), norms="none", N=6),
    Case(
        name="one_token",
        starts=(0, 95, 96),
        counts=(1, 1, 1),
        norms="qwen35",
        T=1,
        gated=True,
        parts=2,
    ),
    Case(name="chunk", starts=(0, 30), counts=(70, 33), norms="qwen3", T=70),
    # Longer than the ring: its last tokens stay.
    Case(name="chunk_ring", starts=(0, 500), counts=(70, 41), norms="gemma", T=70, S=40, ring=True),
    Case(name="wide", starts=(5,), counts=(3,), norms="gemma", T=3, N=1, K=1, H=512, half=24, S=8),
)
"""For the interpreter: every norm, every way to write, sizes that a program does not divide."""

SERVED = (
    Case(name="draft", starts=(1024, 17), counts=(0, 0), norms="qwen3", N=32, K=8, H=128, half=64,
         S=0),
    Case(name="draft_context", starts=(1024, 4100), counts=(6, 16), norms="qwen3", N=0, K=8, H=128,
         half=64, S=4112),
    Case(name="qwen_verify", starts=(1024, 4100), counts=(16, 16), norms="qwen35", N=16, K=4, H=256,
         half=32, S=4112, gated=True, parts=2),
    Case(name="qwen_plain", starts=(1024, 4111), counts=(1, 0), norms="qwen35", N=16, K=4, H=256,
         half=32, S=4112, T=1, gated=True, parts=2),
    Case(name="gemma_sliding", starts=(1024, 3), counts=(16, 16), norms="gemma", N=8, K=2, H=256,
         half=128, S=528, ring=True, parts=8),
    Case(name="gemma_full", starts=(1024, 4100), counts=(16, 16), norms="gemma", N=8, K=2, H=512,
         half=256, S=4112),
    Case(name="gemma_reader", starts=(1024, 4100), counts=(0, 0), norms="gemma", N=8, K=0, H=512,
         half=256, S=0, parts=4),
    Case(name="gemma_plain", starts=(1024, 600), counts=(1, 1), norms="gemma", N=8, K=2, H=256,
         half=128, S=513, ring=True, T=1, parts=8),
    Case(name="qwen_prefill", starts=(1024, 0), counts=(512, 300), norms="qwen35", N=16, K=4, H=256,
         half=32, S=4112, T=512, gated=True),
)  # fmt: skip
"""Heads of the published models: for a card."""
