"""The network of Qwen3.5's multi-token-prediction head: one layer over embedding and hidden state.

Follows vLLM 0.33 `models/qwen3_5_mtp.py`.
"""

import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmflash_jax.drafters.mtp_qwen35_config import Config
from mmflash_jax.layers.cache import AttentionCache
from mmflash_jax.layers.gated_attention import GatedAttention
from mmflash_jax.layers.linear import linear
from mmflash_jax.layers.mlp import SwiGLU
from mmflash_jax.layers.norm import ZeroCentredRMSNorm
from mmflash_jax.layers.residual import add_product
from mmflash_jax.layers.rotary import mrope_angles
from pallas_kernels import Kernels


class DecoderLayer(nnx.Module):
    """As a full-attention layer of the target."""

    def __init__(self, config: Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        norm = functools.partial(ZeroCentredRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm = norm(config.hidden_size)
        self.post_attention_layernorm = norm(config.hidden_size)
        self.self_attn = GatedAttention(config, dtype=dtype, rngs=rngs)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: AttentionCache,
        angles: Float[Array, "B T half"],
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        following: ZeroCentredRMSNorm,
        kernels: Kernels,
    ) -> tuple[Float[Array, "B T D"], AttentionCache]:
        """The output, through the `following` norm."""
        normed = self.input_layernorm(x)
        mixed, cache = self.self_attn(normed, cache, angles, length, count, kernels)
        add = functools.partial(add_product, kernels=kernels)
        x, normed = add(x, self.self_attn.o_proj, mixed, self.post_attention_layernorm)
        return add(x, self.mlp.down_proj, self.mlp.inner(normed), following)[1], cache


class Model(nnx.Module):
    """Two norms, a projection of both halves, the layer and the last norm."""

    def __init__(self, config: Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        norm = functools.partial(ZeroCentredRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        self.pre_fc_norm_embedding = norm(config.hidden_size)
        self.pre_fc_norm_hidden = norm(config.hidden_size)
        self.fc = linear(2 * config.hidden_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype, rngs=rngs)])
        self.norm = norm(config.hidden_size)

    def __call__(
        self,
        rows: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "3 B T"],
        cache: AttentionCache,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        kernels: Kernels = "reference",
    ) -> tuple[Float[Array, "B T D"], AttentionCache]:
        """Hidden states after the last norm, and the cache with `count` more tokens.

        `rows` are the token after each `hidden`.
        """
        c = self.config
        angles = mrope_angles(positions, c.rope_theta, c.rotary_dim, c.mrope_section)
        halves = [self.pre_fc_norm_embedding(rows), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(jnp.concatenate(halves, axis=-1))
        return self.layers[0](x, cache, angles, length, count, self.norm, kernels)
