"""Image encoder of Qwen3.5: patches of an image to one feature row for each merged token.

Follows transformers 5.24 `models/qwen3_5/modeling_qwen3_5.py` (`Qwen3_5VisionModel`) for still
images. Patches come in merge-block order: block row, block column, row in block, column in block,
so that a merged token is a run of `merge^2` patches. Axis letters: docs/axes.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmflash_jax.layers.activation import activate
from mmflash_jax.layers.linear import Embedding, linear
from mmflash_jax.layers.norm import LayerNorm
from mmflash_jax.layers.rotary import rotary_angles
from mmflash_jax.layers.schema import Path
from mmflash_jax.towers.patches import attend, patch_grid
from mmflash_jax.weights import IDENTITY, TRANSPOSE, Rule, Transform, flatten_patches
from mmflash_jax.weights.hf_config import ConfigError, expect, require
from pallas_kernels import apply_rotary

LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The fields of `vision_config` that decide the computation; names are the file's own."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int
    out_hidden_size: int
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def positions_per_side(self) -> int:
        """Side of the square table of learned positions."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """Channels, frames, rows and columns of one patch's pixels."""
        return (self.in_channels, self.temporal_patch_size, self.patch_size, self.patch_size)

    @property
    def patch_values(self) -> int:
        """Values of a flattened patch."""
        return math.prod(self.patch_shape)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "VisionConfig":
        """From the `vision_config` object of a `config.json`.

        Raises:
            ConfigError: a field is missing, contradictory or asks for what is not implemented.
        """
        where = "config.json vision_config"
        expect(
            config,
            where,
            hidden_act=["gelu_pytorch_tanh"],
            # Taps of inner blocks into the text decoder: Qwen3-VL has them, Qwen3.5 does not.
            deepstack_visual_indexes=[[], None],
        )
        rope = config.get("rope_parameters") or {}
        expect(rope, f"{where} rope_parameters", rope_type=["axial", "default"])
        names = (
            "depth", "hidden_size", "intermediate_size", "num_heads", "in_channels",
            "spatial_merge_size", "num_position_embeddings", "out_hidden_size",
        )  # fmt: skip
        made = cls(
            **{name: int(require(config, name, where)) for name in names},
            patch_size=_side(config, "patch_size", where),
            temporal_patch_size=_side(config, "temporal_patch_size", where),
            rope_theta=float(rope.get("rope_theta", 10000.0)),
        )
        if made.hidden_size % made.num_heads or made.head_dim % 4:
            raise ConfigError(
                f"{where}: hidden_size {made.hidden_size} over num_heads {made.num_heads} must "
                "give heads whose width is a multiple of 4"
            )
        if made.positions_per_side**2 != made.num_position_embeddings:
            raise ConfigError(
                f"{where}: num_position_embeddings is {made.num_position_embeddings}, "
                "expected a square number"
            )
        return made


def _side(config: Mapping[str, Any], name: str, where: str) -> int:
    """A size that files hold as a number or as a list of equal numbers."""
    value = require(config, name, where)
    sides = set(value) if isinstance(value, list | tuple) else {value}
    if len(sides) != 1:
        raise ConfigError(f"{where}: {name} is {value!r}, supported: equal sides")
    return int(sides.pop())


class PatchEmbed(nnx.Module):
    """A convolution whose stride is its kernel, as one product over flattened patches."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        pixels = math.prod(config.patch_shape)
        self.proj = linear(pixels, config.hidden_size, dtype=dtype, rngs=rngs, bias=True)

    def __call__(self, patches: Float[Array, "I P C"]) -> Float[Array, "I P D"]:
        return self.proj(patches.astype(self.proj.kernel[...].dtype))


class Attention(nnx.Module):
    """Attention of every patch to every real patch of its image, with 2-D rotary positions."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        width = config.hidden_size
        self.qkv = linear(width, 3 * width, dtype=dtype, rngs=rngs, bias=True)
        self.proj = linear(width, width, dtype=dtype, rngs=rngs, bias=True)

    def __call__(
        self,
        x: Float[Array, "I P D"],
        angles: Float[Array, "I P half"],
        key_mask: Bool[Array, "I P"],
    ) -> Float[Array, "I P D"]:
        images, P, width = x.shape
        qkv = self.qkv(x).reshape(images, P, 3, self.num_heads, self.head_dim)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        # The reference rotates in fp32 whatever the dtype, unlike the text decoder.
        q = apply_rotary(q.astype(jnp.float32), angles).astype(x.dtype)
        k = apply_rotary(k.astype(jnp.float32), angles).astype(x.dtype)
        mixed = attend(q, k, v, key_mask, scale=self.head_dim**-0.5)
        return self.proj(mixed.reshape(images, P, width))


class MLP(nnx.Module):
    """`fc2(gelu_tanh(fc1(x)))`."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        self.linear_fc1 = linear(width, inner, dtype=dtype, rngs=rngs, bias=True)
        self.linear_fc2 = linear(inner, width, dtype=dtype, rngs=rngs, bias=True)

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P D"]:
        return self.linear_fc2(activate(self.linear_fc1(x), "gelu_tanh"))


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.norm1 = LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS, dtype=dtype)
        self.norm2 = LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS, dtype=dtype)
        self.attn = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "I P D"],
        angles: Float[Array, "I P half"],
        key_mask: Bool[Array, "I P"],
    ) -> Float[Array, "I P D"]:
        x = x + self.attn(self.norm1(x), angles, key_mask)
        return x + self.mlp(self.norm2(x))


class Merger(nnx.Module):
    """Norm of each patch, then an MLP over each run of `merge^2` patches."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.unit = config.spatial_merge_size**2
        grouped = config.hidden_size * self.unit
        self.norm = LayerNorm(config.hidden_size, eps=LAYER_NORM_EPS, dtype=dtype)
        self.linear_fc1 = linear(grouped, grouped, dtype=dtype, rngs=rngs, bias=True)
        self.linear_fc2 = linear(grouped, config.out_hidden_size, dtype=dtype, rngs=rngs, bias=True)

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I M out"]:
        images, P, width = x.shape
        grouped = self.norm(x).reshape(images, P // self.unit, width * self.unit)
        # Exact GELU here, tanh GELU in the blocks: so is the reference.
        return self.linear_fc2(activate(self.linear_fc1(grouped), "gelu"))


class VisionTower(nnx.Module):
    """Features of a padded batch of images; sizes are traced, only `I` and `P` are shapes."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.patch_embed = PatchEmbed(config, dtype=dtype, rngs=rngs)
        self.pos_embed = Embedding(
            config.num_position_embeddings, config.hidden_size, dtype=dtype, rngs=rngs
        )
        self.blocks = nnx.List([Block(config, dtype=dtype, rngs=rngs) for _ in range(config.depth)])
        self.merger = Merger(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        patches: Float[Array, "I P C"],
        rows: Int[Array, " I"],
        columns: Int[Array, " I"],
    ) -> Float[Array, "I M out"]:
        """Image `i` fills the first `rows[i] * columns[i]` of P patches and a `merge^2`-th of
        M = P / merge^2 result rows; the rows after them are finite and without meaning.
        """
        config, P = self.config, patches.shape[1]
        row, column = patch_grid(P, columns, config.spatial_merge_size)
        key_mask = jnp.arange(P) < (rows * columns)[:, None]
        x = self.patch_embed(patches)
        x = x + self._learned_positions(row, column, rows, columns).astype(x.dtype)
        quarter = (config.rope_theta, config.head_dim // 2)
        angles = jnp.concatenate(
            [rotary_angles(row, *quarter), rotary_angles(column, *quarter)], axis=-1
        )
        for index, block in enumerate(self.blocks):
            with jax.named_scope(f"block_{index}"):
                x = block(x, angles, key_mask)
        return self.merger(x)

    def _learned_positions(
        self,
        row: Int[Array, "I P"],
        column: Int[Array, "I P"],
        rows: Int[Array, " I"],
        columns: Int[Array, " I"],
    ) -> Float[Array, "I P D"]:
        """The square table stretched over each image, bilinear with aligned corners, fp32."""
        side = self.config.positions_per_side
        total = jnp.zeros((), jnp.float32)
        for row_tap, row_weight in _taps(row, rows, side):
            for column_tap, column_weight in _taps(column, columns, side):
                values = self.pos_embed(row_tap * side + column_tap).astype(jnp.float32)
                total += values * (row_weight * column_weight)[..., None]
        return total


def _taps(
    position: Int[Array, "I P"], size: Int[Array, " I"], side: int
) -> list[tuple[Int[Array, "I P"], Float[Array, "I P"]]]:
    """The two table entries around each position of an axis, with their weights."""
    last = jnp.maximum(size[:, None] - 1, 1)
    source = position.astype(jnp.float32) * (side - 1) / last
    below = jnp.floor(source)
    above_weight = source - below
    low = below.astype(jnp.int32)
    # Padding lies past the table; it is clipped because a wild index would read garbage.
    return [
        (jnp.clip(low, 0, side - 1), 1.0 - above_weight),
        (jnp.clip(low + 1, 0, side - 1), above_weight),
    ]


def weight_rules(
    config: VisionConfig, *, hf_prefix: str = "model.visual.", path: Path = ("visual",)
) -> list[Rule]:
    """Every parameter of a `VisionTower` that sits at `path`, and its checkpoint tensor."""
    rules: list[Rule] = []

    def add(name: str, kernel: str, via: Transform, *, bias: bool = True) -> None:
        place = (*path, *(int(part) if part.isdigit() else part for part in name.split(".")))
        rules.append(Rule(f"{hf_prefix}{name}.weight", (*place, kernel), via))
        if bias:
            rules.append(Rule(f"{hf_prefix}{name}.bias", (*place, "bias")))

    add("patch_embed.proj", "kernel", flatten_patches(config.patch_shape))
    add("pos_embed", "embedding", IDENTITY, bias=False)
    for index in range(config.depth):
        for norm in ("norm1", "norm2"):
            add(f"blocks.{index}.{norm}", "weight", IDENTITY)
        for layer in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2"):
            add(f"blocks.{index}.{layer}", "kernel", TRANSPOSE)
    add("merger.norm", "weight", IDENTITY)
    add("merger.linear_fc1", "kernel", TRANSPOSE)
    add("merger.linear_fc2", "kernel", TRANSPOSE)
    return rules
