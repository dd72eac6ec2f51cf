"""The decoder of Qwen3.5: layers of gated attention and of the gated delta rule.

Follows transformers 5.24 `models/qwen3_5/modeling_qwen3_5.py`.
"""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmflash_jax.layers.cache import AttentionCache
from mmflash_jax.layers.gated_attention import GatedAttention
from mmflash_jax.layers.linear import Embedding
from mmflash_jax.layers.mlp import SwiGLU
from mmflash_jax.layers.norm import ZeroCentredRMSNorm
from mmflash_jax.layers.residual import add_product
from mmflash_jax.targets.qwen3_5_config import Config
from mmflash_jax.targets.qwen3_5_delta import GatedDeltaNet, Pass
from mmflash_jax.towers.qwen3_5_vision import VisionTower


class DecoderLayer(nnx.Module):
    """Mixer and MLP, each behind a norm and added to the stream."""

    def __init__(self, config: Config, kind: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        norm = functools.partial(ZeroCentredRMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm = norm(config.hidden_size)
        self.post_attention_layernorm = norm(config.hidden_size)
        if kind == "full_attention":
            self.self_attn = GatedAttention(config, dtype=dtype, rngs=rngs)
        else:
            self.linear_attn = GatedDeltaNet(config, dtype=dtype, rngs=rngs)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        normed: Float[Array, "B T D"],
        cache: Any,
        now: Pass,
        following: ZeroCentredRMSNorm,
        *,
        decided: bool,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Any]:
        """The stream and its norm, `input_layernorm` before and the `following` one behind."""
        if not isinstance(cache, AttentionCache):
            projection = self.linear_attn.out_proj
            mixed, after = self.linear_attn(normed, cache, now, decided=decided)
        elif now.parents is None:
            projection = self.self_attn.o_proj
            mixed, after = self.self_attn(
                normed, cache, now.angles, now.length, now.count, now.kernels
            )
        else:
            projection = self.self_attn.o_proj
            mixed, after = self.self_attn.attend(
                normed, cache, now.angles, now.length, now.parents, now.kernels
            )
        add = functools.partial(add_product, kernels=now.kernels)
        x, normed = add(x, projection, mixed, self.post_attention_layernorm)
        x, normed = add(x, self.mlp.down_proj, self.mlp.inner(normed), following)
        return x, normed, after


class Model(nnx.Module):
    """Text decoder, image tower and, where it is not tied, the output head."""

    def __init__(self, config: Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, kind, dtype=dtype, rngs=rngs) for kind in config.layer_types]
        )
        self.norm = ZeroCentredRMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.visual = VisionTower(config.vision, dtype=dtype, rngs=rngs)
