"""The text decoder of Gemma 4: layers with per-layer inputs, windows and shared keys.

Follows transformers 5.24 `models/gemma4/modeling_gemma4.py`.
"""

import functools

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from mmflash_jax.layers.activation import activate
from mmflash_jax.layers.cache import AttentionCache, may_write_first, slots_of
from mmflash_jax.layers.linear import Embedding, linear, projected
from mmflash_jax.layers.mlp import GeGLU
from mmflash_jax.layers.norm import GemmaRMSNorm
from mmflash_jax.layers.residual import add_product
from mmflash_jax.layers.tree import BlockRows
from mmflash_jax.targets.gemma4_config import Config, Layer
from mmflash_jax.towers.gemma4_vision import VisionTower
from pallas_kernels import Kernels, attention_heads, block_attention
from pallas_kernels.attention_heads import splits


def times(x: Float[Array, "*batch"], factor: float) -> Float[Array, "*batch"]:
    """Product with a constant, rounded once: torch does not round the constant to bf16 first."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


class Attention(nnx.Module):
    """Attention without a score scale: queries and keys are normed, values too. `o_proj` has yet to
    take its output."""

    def __init__(self, config: Config, layer: Layer, index: int, *, dtype: jnp.dtype,
                 rngs: nnx.Rngs):  # fmt: skip
        self.layer, self.heads = layer, config.num_attention_heads
        self.makes_keys = layer.source == index
        width, inner = config.hidden_size, self.heads * layer.head_dim
        norm = functools.partial(GemmaRMSNorm, layer.head_dim, eps=config.rms_norm_eps, dtype=dtype)
        kv = layer.kv_heads * layer.head_dim if self.makes_keys else 0
        # Queries, keys, values: one kernel, as in `layers.mlp.GatedMLP`.
        self.qkv_proj = linear(width, inner + 2 * kv, dtype=dtype, rngs=rngs)
        self.o_proj = linear(inner, width, dtype=dtype, rngs=rngs)
        self.q_norm = norm()
        if self.makes_keys:
            self.k_norm = norm()
            self.v_norm = norm(weighted=False)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        angles: Float[Array, "B T half"],
        cache: AttentionCache | BlockRows,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        parents: Int[Array, "B T"] | None,
        kernels: Kernels,
    ) -> tuple[Float[Array, "B T inner"], BlockRows]:
        """Output and the keys and values read; `cache` is a maker's own, or a reader's source.

        A maker writes the first `count` tokens of a chain to its cache where `may_write_first`.
        """
        B, T, _ = x.shape
        window, inner = self.layer.window, self.heads * self.layer.head_dim
        columns, head_dim = self.qkv_proj.kernel.shape[-1], self.layer.head_dim
        number = splits(B * T, x.shape[-1], columns, head_dim, x.dtype, kernels)
        joined = projected(self.qkv_proj, x, number)
        heads = functools.partial(
            attention_heads, joined[..., :inner], angles=angles, dtype=x.dtype, head_dim=head_dim,
            q_norm=self.q_norm.norm, kernels=kernels,
        )  # fmt: skip
        ring = window is not None
        if isinstance(cache, AttentionCache):
            first = parents is None and may_write_first(cache.k.shape[2], T, window)
            k, v = jnp.split(joined[..., inner:], 2, axis=-1)
            made = heads(
                k, v, k_norm=self.k_norm.norm, v_norm=self.v_norm.norm,
                slots=slots_of(cache, length, count, ring=ring) if first else None,
            )  # fmt: skip
            rows = BlockRows.of(made, cache)
        else:
            made, rows = heads(None, None), cache
        mixed = block_attention(
            made.q, k_cache=rows.cache.k, v_cache=rows.cache.v, k_block=rows.k, v_block=rows.v,
            length=length, parents=parents, scale=1.0, causal=True, window=window, ring=ring,
            kernels=kernels,
        )  # fmt: skip
        return mixed.reshape(B, T, -1), rows


class DecoderLayer(nnx.Module):
    """Attention, MLP and per-layer input, each between two norms; then the layer's scalar."""

    def __init__(self, config: Config, index: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, extra = config.hidden_size, config.hidden_size_per_layer_input
        layer = config.layers[index]
        norm = functools.partial(GemmaRMSNorm, width, eps=config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, layer, index, dtype=dtype, rngs=rngs)
        self.mlp = GeGLU(width, layer.intermediate_size, dtype=dtype, rngs=rngs)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.per_layer_input_gate = linear(width, extra, dtype=dtype, rngs=rngs)
        self.per_layer_projection = linear(extra, width, dtype=dtype, rngs=rngs)
        self.post_per_layer_input_norm = norm()
        self.layer_scalar = nnx.Param(jnp.ones((1,), dtype))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        normed: Float[Array, "B T D"],
        per_layer: Float[Array, "B T E"],
        angles: Float[Array, "B T half"],
        cache: AttentionCache | BlockRows,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        parents: Int[Array, "B T"] | None,
        following: GemmaRMSNorm,
        kernels: Kernels,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], BlockRows]:
        """The stream and its norm, `input_layernorm` before and the `following` one behind, and the
        keys and values read, as `Attention` gives them."""
        add = functools.partial(add_product, kernels=kernels)
        mixed, rows = self.self_attn(normed, angles, cache, length, count, parents, kernels)
        x, normed = add(
            x, self.self_attn.o_proj, mixed, self.pre_feedforward_layernorm,
            post=self.post_attention_layernorm,
        )  # fmt: skip
        x, _ = add(
            x, self.mlp.down_proj, self.mlp.inner(normed), None,
            post=self.post_feedforward_layernorm,
        )  # fmt: skip
        gate = activate(self.per_layer_input_gate(x), "gelu_tanh")
        # Drawn into the product, the gate would take a copy of `per_layer` and a slower product.
        gated = lax.optimization_barrier(gate * per_layer)
        x, normed = add(
            x, self.per_layer_projection, gated, following,
            post=self.post_per_layer_input_norm, factor=self.layer_scalar[...],
        )  # fmt: skip
        return x, normed, rows


class Model(nnx.Module):
    """Text decoder with a tied head, and the image tower."""

    def __init__(self, config: Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        layers, extra = config.num_hidden_layers, config.hidden_size_per_layer_input
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.embed_tokens_per_layer = Embedding(
            config.vocab_size_per_layer_input, layers * extra, dtype=dtype, rngs=rngs
        )
        self.per_layer_model_projection = linear(
            config.hidden_size, layers * extra, dtype=dtype, rngs=rngs
        )
        self.per_layer_projection_norm = GemmaRMSNorm(extra, eps=config.rms_norm_eps, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(config, index, dtype=dtype, rngs=rngs) for index in range(layers)]
        )
        self.norm = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.visual = VisionTower(config.vision, dtype=dtype, rngs=rngs)
