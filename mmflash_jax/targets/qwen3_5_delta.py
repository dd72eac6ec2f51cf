"""The gated delta net of Qwen3.5, with its cache and the lazy commit of drafted blocks.

Follows `Qwen3_5GatedDeltaNet` of transformers 5.24. Inputs of the convolution are kept in a ring by
position, as keys are, so nothing of them needs undoing.
"""

from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmflash_jax.layers.linear import linear
from mmflash_jax.layers.norm import GatedRMSNorm
from mmflash_jax.layers.tree import along
from mmflash_jax.targets.qwen3_5_config import Config
from pallas_kernels import Kernels, gated_delta_chunked, gated_delta_step, gated_delta_tree
from pallas_kernels.gated_delta import (
    convolve,
    fold_pending,
    from_ring,
    gates,
    queries_keys_values,
    to_ring,
)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What every layer of one pass needs.

    angles: fp32 `[B, T, half]`.
    length, count: int32 `[B]`, where the tokens start and how many are real.
    pending: int32 `[B]`, tokens of the last block still to be folded in.
    parents: int32 `[B, T]` if the tokens are a tree of drafts.
    """

    angles: Array
    length: Array
    count: Array
    pending: Array
    parents: Array | None
    kernels: Kernels


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeltaCache:
    """State before the last block, that block's records and the convolution's inputs.

    state: fp32 `[B, vh, kd, vd]`.
    updates, decay: fp32 records `[B, vh, block, vd]`, `[B, vh, block]`.
    rows: `[B, taps - 1 + 2 * block, channels]`, a ring; slot p modulo its size holds position p.
    """

    state: Array
    updates: Array
    decay: Array
    rows: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeltaTree:
    """A cache whose records are those of a tree's nodes, and their convolution inputs
    `[B, T, channels]`, which are not in its ring."""

    cache: DeltaCache
    rows: Array


class GatedDeltaNet(nnx.Module):
    """Short convolution, gated delta rule, gated norm, whose output `out_proj` has yet to take.

    Positions play no part.
    """

    def __init__(self, config: Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.key_heads, self.key_dim = config.linear_num_key_heads, config.linear_key_head_dim
        self.value_heads = config.linear_num_value_heads
        self.value_dim = config.linear_value_head_dim
        self.taps = config.linear_conv_kernel_dim
        width, values = config.hidden_size, self.value_heads * self.value_dim
        # Side by side: inputs of the convolution, output gate, write strengths, decays. Apart they
        # would be three products, and the kernel would be handed a copy of a slice.
        joined = config.delta_channels + values + 2 * self.value_heads
        self.in_proj = linear(width, joined, dtype=dtype, rngs=rngs)
        self.conv1d = nnx.Param(jnp.zeros((self.taps, config.delta_channels), dtype))
        # Checkpoints keep the decay parameters wide; a rounded A_log shifts every step's decay.
        self.A_log = nnx.Param(jnp.zeros((self.value_heads,), jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones((self.value_heads,), jnp.float32))
        self.norm = GatedRMSNorm(self.value_dim, eps=config.rms_norm_eps)
        self.out_proj = linear(values, width, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], cache: DeltaCache, now: Pass, *, decided: bool
    ) -> tuple[Float[Array, "B T values"], DeltaCache | DeltaTree]:
        """One pass; `decided` tokens enter the state at once, others leave records behind."""
        B, T, _ = x.shape
        drafted = self._verify if now.parents is None else self._verify_tree
        run = self._absorb if decided else drafted
        projected = self.in_proj(x)
        out, after = run(projected, cache, now)
        channels, width = self.conv1d.shape[1], self.value_heads * self.value_dim
        z = projected[..., channels : channels + width]
        z = z.reshape(B, T, self.value_heads, self.value_dim)
        return self.norm(out, z).reshape(B, T, -1), after

    def _apart(self, projected: Float[Array, "B T width"]) -> tuple[Array, Array, Array]:
        """The convolution's inputs, write strengths and decays of a joined projection."""
        b, a = jnp.split(projected[..., -2 * self.value_heads :], 2, axis=-1)
        return projected[..., : self.conv1d.shape[1]], b, a

    def _verify(
        self, projected: Float[Array, "B T width"], cache: DeltaCache, now: Pass
    ) -> tuple[Float[Array, "B T vh vd"], DeltaCache]:
        """Fold in what stayed of the last block, then run this one without deciding on it."""
        out, state, updates, decay, rows = gated_delta_step(
            cache.rows, projected, self.conv1d[...], self.A_log[...], self.dt_bias[...],
            cache.state, cache.updates, cache.decay, now.length, now.count, now.pending,
            key_heads=self.key_heads, kernels=now.kernels,
        )  # fmt: skip
        return out, DeltaCache(state=state, updates=updates, decay=decay, rows=rows)

    def _verify_tree(
        self, projected: Float[Array, "B T width"], cache: DeltaCache, now: Pass
    ) -> tuple[Float[Array, "B T vh vd"], DeltaTree]:
        """`_verify` where every node of a tree continues its own branch."""
        assert now.parents is not None
        qkv, b, a = self._apart(projected)
        out, state, updates, decay = gated_delta_tree(
            cache.rows, qkv, self.conv1d[...], a, b, self.A_log[...], self.dt_bias[...],
            cache.state, cache.updates, cache.decay, now.length, now.pending, now.parents,
            key_heads=self.key_heads, kernels=now.kernels,
        )  # fmt: skip
        room = cache.updates.shape[2] - qkv.shape[1]
        after = DeltaCache(
            state=state,
            updates=jnp.pad(updates, ((0, 0), (0, 0), (0, room), (0, 0))),
            decay=jnp.pad(decay, ((0, 0), (0, 0), (0, room))),
            rows=cache.rows,
        )
        return out, DeltaTree(cache=after, rows=qkv)

    def _absorb(
        self, projected: Float[Array, "B T width"], cache: DeltaCache, now: Pass
    ) -> tuple[Float[Array, "B T vh vd"], DeltaCache]:
        """Run decided tokens in chunks; nothing is pending afterwards."""
        qkv, b, a = self._apart(projected)
        kernel = self.conv1d[...]
        state = fold_pending(
            cache.rows, kernel, cache.state, cache.updates, cache.decay, now.length, now.pending,
            key_heads=self.key_heads,
        )  # fmt: skip
        tail = from_ring(cache.rows, now.length - (self.taps - 1), self.taps - 1)
        mixed = convolve(jnp.concatenate([tail, qkv], axis=1), kernel)
        g, beta = gates(a, b, self.A_log[...], self.dt_bias[...])
        # A padded token must neither decay nor write the state.
        real = (jnp.arange(qkv.shape[1]) < now.count[:, None])[..., None]
        g, beta = jnp.where(real, g, 0.0), jnp.where(real, beta, 0.0)
        q, k, v = queries_keys_values(mixed, self.key_heads, state)
        out, state = gated_delta_chunked(q, k, v, g, beta, state)
        return out.astype(qkv.dtype), DeltaCache(
            state=state,
            updates=jnp.zeros_like(cache.updates),
            decay=jnp.zeros_like(cache.decay),
            rows=to_ring(cache.rows, qkv, now.length, now.count),
        )


def commit_delta(
    tree: DeltaTree, path: Int[Array, "B P"], length: Int[Array, " B"], keep: Int[Array, " B"]
) -> DeltaCache:
    """The cache in which the first `keep` nodes of `path` are a block of a chain.

    Decay and updates of a node depend on its ancestors alone, so those of a path are a chain's; all
    of them still wait to be folded in.
    """
    cache, count = tree.cache, path.shape[1]
    # Records lie by head, then by node.
    updates = along(path, cache.updates.swapaxes(1, 2)).swapaxes(1, 2)
    decay = along(path, cache.decay.swapaxes(1, 2)).swapaxes(1, 2)
    return DeltaCache(
        state=cache.state,
        updates=cache.updates.at[:, :, :count].set(updates),
        decay=cache.decay.at[:, :, :count].set(decay),
        rows=to_ring(cache.rows, along(path, tree.rows), length, keep),
    )
