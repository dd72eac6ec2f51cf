"""Attention of Qwen3.5: normed queries and keys, and a sigmoid gate on the output.

Follows transformers 5.24 `models/qwen3_5/modeling_qwen3_5.py`. The target's full-attention layers
and its multi-token-prediction head are made of it.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmflash_jax.layers.attention import AttentionShape
from mmflash_jax.layers.cache import AttentionCache, slots_of
from mmflash_jax.layers.linear import linear, projected
from mmflash_jax.layers.norm import ZeroCentredRMSNorm
from mmflash_jax.layers.tree import BlockRows
from pallas_kernels import Kernels, attention_heads, block_attention
from pallas_kernels.attention_heads import splits
from pallas_kernels.parts import whole


class GatedAttention(nnx.Module):
    """Full attention with normed queries and keys and a sigmoid gate on its output, which `o_proj`
    has yet to take."""

    def __init__(self, config: AttentionShape, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.kv_heads = config.num_key_value_heads
        width, inner = config.hidden_size, self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        # Queries with their gates, keys, values: one kernel, as in `layers.mlp.GatedMLP`.
        self.qkv_proj = linear(width, 2 * inner + 2 * kv, dtype=dtype, rngs=rngs)
        self.o_proj = linear(inner, width, dtype=dtype, rngs=rngs)
        self.q_norm = ZeroCentredRMSNorm(self.head_dim, eps=config.rms_norm_eps, dtype=dtype)
        self.k_norm = ZeroCentredRMSNorm(self.head_dim, eps=config.rms_norm_eps, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: AttentionCache,
        angles: Float[Array, "B T half"],
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        kernels: Kernels,
    ) -> tuple[Float[Array, "B T inner"], AttentionCache]:
        """Output of T tokens from `length` on, and the cache with the first `count` of them."""
        out, rows = self.attend(x, cache, angles, length, None, kernels, count)
        return out, rows.cache

    def attend(
        self,
        x: Float[Array, "B T D"],
        cache: AttentionCache,
        angles: Float[Array, "B T half"],
        length: Int[Array, " B"],
        parents: Int[Array, "B T"] | None,
        kernels: Kernels,
        count: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T inner"], BlockRows]:
        """Output of T tokens, a chain or a tree, and their keys and values.

        The first `count` tokens are in the cache then, which is safe before it is read
        (`layers.cache.may_write_first`); without `count` all wait beside it.
        """
        B, T, _ = x.shape
        dtype, columns = x.dtype, self.qkv_proj.kernel.shape[-1]
        number = splits(B * T, x.shape[-1], columns, self.head_dim, dtype, kernels)
        q, k, v = self._apart(projected(self.qkv_proj, x, number))
        heads = attention_heads(
            q, k, v, angles, dtype=dtype, head_dim=self.head_dim, gated=True,
            q_norm=self.q_norm.norm, k_norm=self.k_norm.norm,
            slots=None if count is None else slots_of(cache, length, count), kernels=kernels,
        )  # fmt: skip
        rows = BlockRows.of(heads, cache)
        mixed = block_attention(
            heads.q, k_cache=rows.cache.k, v_cache=rows.cache.v, k_block=rows.k, v_block=rows.v,
            length=length, parents=parents, scale=self.head_dim**-0.5, causal=True,
            kernels=kernels,
        )  # fmt: skip
        # Query and gate sit side by side inside each head, not in two halves of the projection.
        gate = whole(q, B * T, dtype).reshape(B, T, self.heads, 2, self.head_dim)[:, :, :, 1]
        gate = gate.reshape(B, T, -1)
        return mixed.reshape(B, T, -1) * jax.nn.sigmoid(gate), rows

    def _apart(self, joined: Float[Array, "S P C"]) -> list[Array]:
        kv = self.kv_heads * self.head_dim
        queries = joined.shape[-1] - 2 * kv
        return jnp.split(joined, [queries, queries + kv], axis=-1)
