"""The network of DFlash: Qwen3 layers over a block; the context reaches them as keys and values.

Follows z-lab `dflash` 0.1.0 `model.py`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from mmflash_jax.drafters.dflash_config import Config, Layer
from mmflash_jax.layers.attention import Attention
from mmflash_jax.layers.linear import linear
from mmflash_jax.layers.mlp import SwiGLU
from mmflash_jax.layers.norm import RMSNorm
from mmflash_jax.layers.residual import add_product
from mmflash_jax.layers.rotary import rotary_angles
from pallas_kernels import HeadRows, Kernels, Slots, block_attention


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DFlashState:
    """Context keys and values of each layer, `[B, K, S, H]`; slot s holds token s."""

    k: tuple[Array, ...]
    v: tuple[Array, ...]


class DecoderLayer(nnx.Module):
    """A Qwen3 layer over the block; the context reaches it as keys and values only."""

    def __init__(self, config: Config, layer: Layer, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, dtype=dtype
        )
        self.self_attn = Attention(config, config.hidden_size, dtype=dtype, rngs=rngs)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B A T D"],
        normed: Float[Array, "B A T D"],
        k_context: Float[Array, "B K S H"],
        v_context: Float[Array, "B K S H"],
        start: Int[Array, "B A"],
        angles: Float[Array, "R T half"],
        first: Int[Array, "B A"] | None,
        following: RMSNorm,
        kernels: Kernels,
        attention_kernels: Kernels,
    ) -> tuple[Float[Array, "B A T D"], Float[Array, "B A T D"]]:
        """`A` blocks of each row over its one context; `R` is `B * A`.

        The stream and its norm, `input_layernorm` before and the `following` one behind.
        """
        attention = self.self_attn
        B, A, T, D = x.shape
        rows = attention.rows(normed.reshape(B * A, T, D), angles, kernels)
        mixed = block_attention(
            rows.q, k_context, v_context, rows.k, rows.v, start.reshape(-1),
            first=None if first is None else first.reshape(-1),
            scale=attention.head_dim**-0.5,
            causal=self.layer.causal,
            window=self.layer.window,
            kernels=attention_kernels,
        )  # fmt: skip
        add = functools.partial(add_product, kernels=kernels)
        mixed = mixed.reshape(B, A, T, -1)
        x, normed = add(x, attention.o_proj, mixed, self.post_attention_layernorm)
        return add(x, self.mlp.down_proj, self.mlp.inner(normed), following)


class Model(nnx.Module):
    """Context projection, layers and final norm; the head is the target's."""

    def __init__(self, config: Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        captured = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = linear(captured, config.hidden_size, dtype=dtype, rngs=rngs)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype=dtype, rngs=rngs) for layer in config.layers]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

    def _angles(self, position: Int[Array, "R T"]) -> Float[Array, "R T half"]:
        return rotary_angles(position, self.config.rope_theta, self.config.head_dim)

    def context(
        self,
        features: Float[Array, "B T features"],
        start: Int[Array, " B"],
        slots: Sequence[Slots | None],
        kernels: Kernels = "reference",
    ) -> list[HeadRows]:
        """Keys and values for tokens at `start ..`, and the caches of `slots`, layer by layer."""
        position = start[:, None] + jnp.arange(features.shape[1])
        projected = self.hidden_norm(self.fc(features.astype(self.fc.dtype)))
        angles = self._angles(position)
        made = []
        for layer, own in zip(self.layers, slots, strict=True):
            rows = layer.self_attn.keys_values(projected, angles, own, kernels)
            # With one input for all layers XLA:GPU joins their products, for which it copies all
            # these weights into one matrix in every step.
            projected, k = lax.optimization_barrier((projected, rows.k))
            made.append(rows._replace(k=k))
        return made

    def denoise(
        self,
        x: Float[Array, "B A T D"],
        state: DFlashState,
        start: Int[Array, "B A"],
        first: Int[Array, "B A"] | None = None,
        kernels: Kernels = "reference",
        attention_kernels: Kernels = "reference",
    ) -> Float[Array, "B A T D"]:
        """Hidden states of `A` blocks a row; block `a` sees context before `start[:, a]` only,
        and from `first[:, a]` on if that is given. `kernels` are of all but attention."""
        B, A, T, _ = x.shape
        angles = self._angles(start.reshape(B * A, 1) + jnp.arange(T))
        norms = [*(layer.input_layernorm for layer in self.layers), self.norm]
        normed = norms[0](x)
        for layer, k, v, following in zip(self.layers, state.k, state.v, norms[1:], strict=True):
            x, normed = layer(
                x, normed, k, v, start, angles, first, following, kernels, attention_kernels
            )
        return normed
