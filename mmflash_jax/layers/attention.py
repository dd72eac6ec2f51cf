"""Queries, keys and values of an ordinary attention layer: heads, optional norms, rotation."""

import functools
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmflash_jax.layers.linear import linear, projected
from mmflash_jax.layers.norm import RMSNorm
from pallas_kernels import HeadRows, Kernels, Slots, attention_heads


@runtime_checkable
class AttentionShape(Protocol):
    """The fields of a config that decide the layer's shape."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


@runtime_checkable
class BiasedShape(AttentionShape, Protocol):
    """The same where the projections may have biases."""

    @property
    def attention_bias(self) -> bool: ...


class Attention(nnx.Module):
    """The projections of Qwen3's attention, or with `normed=False` of Llama's.

    `width_in` is the width of what is projected, `hidden_size` that of what comes out.
    """

    def __init__(
        self,
        config: BiasedShape,
        width_in: int,
        *,
        normed: bool = True,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.normed = config.head_dim, normed
        inner, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        project = functools.partial(linear, dtype=dtype, rngs=rngs, bias=config.attention_bias)
        self.q_proj = project(width_in, inner)
        self.k_proj = project(width_in, kv)
        self.v_proj = project(width_in, kv)
        self.o_proj = project(inner, config.hidden_size)
        if normed:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps, dtype=dtype)

    def rows(
        self,
        x: Float[Array, "R T D"],
        angles: Float[Array, "R T half"],
        kernels: Kernels = "reference",
    ) -> HeadRows:
        """Queries, keys and values."""
        return self._rows(projected(self.q_proj, x, 1), x, angles, kernels=kernels)

    def keys_values(
        self,
        x: Float[Array, "R T D"],
        angles: Float[Array, "R T half"],
        slots: Slots | None = None,
        kernels: Kernels = "reference",
    ) -> HeadRows:
        """Keys and values, and the caches of `slots` with them."""
        return self._rows(None, x, angles, slots=slots, kernels=kernels)

    def _rows(self, q: Array | None, x: Array, angles: Array, **options: Any) -> HeadRows:
        return attention_heads(
            q, projected(self.k_proj, x, 1), projected(self.v_proj, x, 1), angles, dtype=x.dtype,
            head_dim=self.head_dim,
            q_norm=self.q_norm.norm if self.normed else None,
            k_norm=self.k_norm.norm if self.normed else None, **options,
        )  # fmt: skip
