"""The network of a Gemma 4 assistant: layers of queries alone, and a head over likely tokens.

Follows transformers 5.24 `models/gemma4_assistant/modeling_gemma4_assistant.py`.
"""

import functools
from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from mmflash_jax.drafters.base import Anchor
from mmflash_jax.drafters.gemma4_assistant_config import Config, Layer
from mmflash_jax.layers.cache import CachedKeys
from mmflash_jax.layers.linear import Embedding, linear
from mmflash_jax.layers.mlp import GeGLU
from mmflash_jax.layers.norm import GemmaRMSNorm
from mmflash_jax.layers.rotary import proportional_angles
from pallas_kernels import Kernels, apply_rotary, block_attention
from pallas_kernels.product import matmul_precision


class Attention(nnx.Module):
    """Queries over the target's committed tokens, without a score scale."""

    def __init__(self, config: Config, layer: Layer, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.layer, self.heads = layer, config.num_attention_heads
        inner = self.heads * layer.head_dim
        self.q_proj = linear(config.hidden_size, inner, dtype=dtype, rngs=rngs)
        self.o_proj = linear(inner, config.hidden_size, dtype=dtype, rngs=rngs)
        self.q_norm = GemmaRMSNorm(layer.head_dim, eps=config.rms_norm_eps, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B 1 D"], keys: CachedKeys, anchor: Anchor, kernels: Kernels
    ) -> Float[Array, "B 1 D"]:
        layer, B = self.layer, x.shape[0]
        rotary = layer.rotary
        angles = proportional_angles(
            anchor.positions[0][:, None], rotary.theta, layer.head_dim, rotary.share
        )
        q = apply_rotary(self.q_norm(self.q_proj(x).reshape(B, 1, self.heads, -1)), angles)
        # The attention operation wants a block: the newest token is one.
        newest = jnp.maximum(anchor.length - 1, 0)
        k, v = keys.row(newest)
        mixed = block_attention(
            q, k_cache=keys.cache.k, v_cache=keys.cache.v, k_block=k, v_block=v, length=newest,
            scale=1.0, causal=True, ring=keys.ring, kernels=kernels,
            # In transformers `window` tokens before the newest and that one: one more than the
            # target's own queries see.
            window=None if layer.window is None else layer.window + 1,
        )  # fmt: skip
        return self.o_proj(mixed.reshape(B, 1, -1))


class DecoderLayer(nnx.Module):
    """Attention and MLP, each between two norms; then the layer's scalar."""

    def __init__(self, config: Config, layer: Layer, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width = config.hidden_size
        norm = functools.partial(GemmaRMSNorm, width, eps=config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp = GeGLU(width, config.intermediate_size, dtype=dtype, rngs=rngs)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.layer_scalar = nnx.Param(jnp.ones((1,), dtype))

    def __call__(
        self, x: Float[Array, "B 1 D"], keys: CachedKeys, anchor: Anchor, kernels: Kernels
    ) -> Float[Array, "B 1 D"]:
        mixed = self.self_attn(self.input_layernorm(x), keys, anchor, kernels)
        x = x + self.post_attention_layernorm(mixed)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar[...]


class Model(nnx.Module):
    """Projections from and to the target's width, layers, and a head over likely tokens."""

    def __init__(self, config: Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        width, outer = config.hidden_size, config.backbone_hidden_size
        self.pre_projection = linear(2 * outer, width, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype=dtype, rngs=rngs) for layer in config.layers]
        )
        self.norm = GemmaRMSNorm(width, eps=config.rms_norm_eps, dtype=dtype)
        self.post_projection = linear(width, outer, dtype=dtype, rngs=rngs)
        self.embed_tokens = Embedding(config.vocab_size, width, dtype=dtype, rngs=rngs)
        if config.num_centroids is not None:
            self.centroids = linear(width, config.num_centroids, dtype=dtype, rngs=rngs)
            self.token_ordering = nnx.Param(jnp.arange(config.vocab_size, dtype=jnp.int32))

    def __call__(
        self,
        row: Float[Array, "B 1 backbone"],
        hidden: Float[Array, "B 1 backbone"],
        keys: Mapping[str, CachedKeys],
        anchor: Anchor,
        kernels: Kernels,
    ) -> tuple[Float[Array, "B 1 V"], Float[Array, "B 1 backbone"]]:
        """fp32 logits of the token after the one of `row`, and the next `hidden`."""
        x = self.pre_projection(jnp.concatenate([row, hidden], axis=-1))
        for layer in self.layers:
            x = layer(x, keys[layer.self_attn.layer.kind], anchor, kernels)
        x = self.norm(x)
        return self._logits(x), self.post_projection(x)

    def _logits(self, x: Float[Array, "B 1 D"]) -> Float[Array, "B 1 V"]:
        """Of the tokens of the likeliest centroids; the others are excluded."""
        if self.config.num_centroids is None:
            return self.embed_tokens.attend(x)
        _, groups = lax.top_k(self.centroids(x), self.config.centroid_intermediate_top_k)
        ordering = self.token_ordering[...].reshape(self.config.num_centroids, -1)
        ids = ordering[groups].reshape(*x.shape[:2], -1)
        table = self.embed_tokens(ids)
        found = jnp.einsum(
            "BTD,BTCD->BTC", x, table, precision=matmul_precision(table.dtype),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        none = jnp.full((*x.shape[:2], self.config.vocab_size), -jnp.inf, jnp.float32)
        rows = jnp.arange(x.shape[0])[:, None, None]
        return none.at[rows, 0, ids].set(found)
