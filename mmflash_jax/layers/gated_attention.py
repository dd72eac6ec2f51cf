"""Attention of Qwen3.5: normed queries and keys, and a sigmoid gate on the output.

Follows transformers 5.24 `models/qwen3_5/modeling_qwen3_5.py`. The target's full-attention layers
and its multi-token-prediction head are made of it.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmflash_jax.layers.attention import AttentionShape
from mmflash_jax.layers.cache import AttentionCache, write_cache
from mmflash_jax.layers.linear import linear
from mmflash_jax.layers.norm import ZeroCentredRMSNorm
from mmflash_jax.layers.rotary import apply_rotary
from mmflash_jax.layers.tree import BlockRows
from pallas_kernels import Kernels, block_attention


class GatedAttention(nnx.Module):
    """Full attention with normed queries and keys and a sigmoid gate on its output, which `o_proj`
    has yet to take."""

    def __init__(self, config: AttentionShape, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.kv_heads = config.num_key_value_heads
        width, inner = config.hidden_size, self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        self.q_proj = linear(width, 2 * inner, dtype=dtype, rngs=rngs)
        self.k_proj = linear(width, kv, dtype=dtype, rngs=rngs)
        self.v_proj = linear(width, kv, dtype=dtype, rngs=rngs)
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
        out, rows = self.attend(x, cache, angles, length, None, kernels)
        return out, write_cache(cache, rows.k, rows.v, length, count)

    def attend(
        self,
        x: Float[Array, "B T D"],
        cache: AttentionCache,
        angles: Float[Array, "B T half"],
        length: Int[Array, " B"],
        parents: Int[Array, "B T"] | None,
        kernels: Kernels,
    ) -> tuple[Float[Array, "B T inner"], BlockRows]:
        """Output of T tokens, a chain or a tree, whose keys and values wait beside the cache."""
        B, T, _ = x.shape
        # Query and gate sit side by side inside each head, not in two halves of the projection.
        q, gate = jnp.split(self.q_proj(x).reshape(B, T, self.heads, -1), 2, axis=-1)
        k = self.k_proj(x).reshape(B, T, self.kv_heads, -1)
        v = self.v_proj(x).reshape(B, T, self.kv_heads, -1)
        q = apply_rotary(self.q_norm(q), angles)
        k = apply_rotary(self.k_norm(k), angles)
        mixed = block_attention(
            q, k_cache=cache.k, v_cache=cache.v, k_block=k, v_block=v, length=length,
            parents=parents, scale=self.head_dim**-0.5, causal=True, kernels=kernels,
        )  # fmt: skip
        gated = mixed.reshape(B, T, -1) * jax.nn.sigmoid(gate.reshape(B, T, -1))
        return gated, BlockRows(cache=cache, k=k, v=v)
