"""Queries, keys and values of an ordinary attention layer: heads, optional norms, rotation."""

import functools
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmflash_jax.layers.linear import linear
from mmflash_jax.layers.norm import RMSNorm
from mmflash_jax.layers.rotary import apply_rotary


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

    def queries(
        self, x: Float[Array, "R T D"], angles: Float[Array, "R T half"]
    ) -> Float[Array, "R T N H"]:
        q = self.q_proj(x).reshape(*x.shape[:2], self.heads, self.head_dim)
        return apply_rotary(self.q_norm(q) if self.normed else q, angles)

    def keys_values(
        self, x: Float[Array, "R T D"], angles: Float[Array, "R T half"]
    ) -> tuple[Float[Array, "R T K H"], Float[Array, "R T K H"]]:
        k = self.k_proj(x).reshape(*x.shape[:2], self.kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(*x.shape[:2], self.kv_heads, self.head_dim)
        return apply_rotary(self.k_norm(k) if self.normed else k, angles), v
