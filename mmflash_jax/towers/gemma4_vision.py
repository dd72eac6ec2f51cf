"""Image encoder of Gemma 4: patches of an image to one feature row for each pooled token.

Follows transformers 5.24 `models/gemma4/modeling_gemma4.py` (`Gemma4VisionModel` and the
`Gemma4MultimodalEmbedder` behind it) for still images. Patches come in merge-block order
(mmflash_jax/towers/patches.py), so that a pooled token is a run of `pooling_kernel_size^2` of
them; the reference takes them row by row, each with its position. Axis letters: docs/axes.md.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from mmflash_jax.layers.activation import activate
from mmflash_jax.layers.linear import linear
from mmflash_jax.layers.norm import GemmaRMSNorm
from mmflash_jax.layers.rotary import rotary_angles
from mmflash_jax.layers.schema import Path
from mmflash_jax.towers.gemma4_vision_config import VisionConfig
from mmflash_jax.towers.patches import attend, patch_grid
from mmflash_jax.weights import IDENTITY, TRANSPOSE, Rule, Transform
from pallas_kernels import apply_rotary

BOUNDS = ("input_min", "input_max", "output_min", "output_max")
# Checkpoints keep a bound without axes; with one it can be sliced like every other array.
SCALAR = Transform("scalar", lambda x: x.reshape(1), lambda x: x.reshape(()))


class ClippedLinear(nnx.Module):
    """A projection without bias; where the config says so, input and output are clamped.

    The bounds have the dtype of the weights: so the reference loads them and compares.
    """

    def __init__(
        self,
        width_in: int,
        width_out: int,
        config: VisionConfig,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.clipped = config.use_clipped_linears
        self.linear = linear(width_in, width_out, dtype=dtype, rngs=rngs)
        if self.clipped:
            self.input_min = nnx.Param(jnp.full((1,), -jnp.inf, dtype))
            self.input_max = nnx.Param(jnp.full((1,), jnp.inf, dtype))
            self.output_min = nnx.Param(jnp.full((1,), -jnp.inf, dtype))
            self.output_max = nnx.Param(jnp.full((1,), jnp.inf, dtype))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:
        if not self.clipped:
            return self.linear(x)
        x = self.linear(jnp.clip(x, self.input_min[...], self.input_max[...]))
        return jnp.clip(x, self.output_min[...], self.output_max[...])


class PatchEmbedder(nnx.Module):
    """Product over flattened patches plus one learned row for each axis of the position."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.input_proj = linear(config.patch_values, config.hidden_size, dtype=dtype, rngs=rngs)
        table = (2, config.position_embedding_size, config.hidden_size)
        self.position_embedding_table = nnx.Param(jnp.ones(table, dtype))

    def __call__(
        self,
        patches: Float[Array, "I P C"],
        row: Int[Array, "I P"],
        column: Int[Array, "I P"],
    ) -> Float[Array, "I P D"]:
        table = self.position_embedding_table[...]
        # Processors leave pixels in [0, 1]; the model centres them, in fp32.
        centred = (2 * (patches.astype(jnp.float32) - 0.5)).astype(table.dtype)
        # Padding can lie past the table; it is clipped because a wild index would read garbage.
        last = table.shape[1] - 1
        across, down = table[0][jnp.minimum(column, last)], table[1][jnp.minimum(row, last)]
        return self.input_proj(centred) + (across + down)


class Attention(nnx.Module):
    """Attention of every patch to every real patch of its image, with 2-D rotary positions.

    The first half of a head turns with the column, the second with the row. Norms of the heads
    take the place of a scale.
    """

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.q_proj = ClippedLinear(width, inner, config, dtype=dtype, rngs=rngs)
        self.k_proj = ClippedLinear(width, inner, config, dtype=dtype, rngs=rngs)
        self.v_proj = ClippedLinear(width, inner, config, dtype=dtype, rngs=rngs)
        self.o_proj = ClippedLinear(inner, width, config, dtype=dtype, rngs=rngs)
        eps = config.rms_norm_eps
        self.q_norm = GemmaRMSNorm(config.head_dim, eps=eps, dtype=dtype)
        self.k_norm = GemmaRMSNorm(config.head_dim, eps=eps, dtype=dtype)
        self.v_norm = GemmaRMSNorm(config.head_dim, eps=eps, dtype=dtype, weighted=False)

    def __call__(
        self,
        x: Float[Array, "I P D"],
        across: Float[Array, "I P quarter"],
        down: Float[Array, "I P quarter"],
        key_mask: Bool[Array, "I P"],
    ) -> Float[Array, "I P D"]:
        images, P, _ = x.shape
        heads = (images, P, self.num_heads, self.head_dim)
        q = self.q_norm(self.q_proj(x).reshape(heads))
        k = self.k_norm(self.k_proj(x).reshape(heads))
        v = self.v_norm(self.v_proj(x).reshape(heads))
        q, k = _turn(q, across, down), _turn(k, across, down)
        return self.o_proj(attend(q, k, v, key_mask, scale=1.0).reshape(images, P, -1))


def _turn(
    x: Float[Array, "I P N H"],
    across: Float[Array, "I P quarter"],
    down: Float[Array, "I P quarter"],
) -> Float[Array, "I P N H"]:
    """Each half of every head by the angles of its axis, in the dtype of `x`."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([apply_rotary(first, across), apply_rotary(second, down)], axis=-1)


class MLP(nnx.Module):
    """`down(gelu_tanh(gate(x)) * up(x))` of clipped projections."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = ClippedLinear(width, inner, config, dtype=dtype, rngs=rngs)
        self.up_proj = ClippedLinear(width, inner, config, dtype=dtype, rngs=rngs)
        self.down_proj = ClippedLinear(inner, width, config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "I P D"]) -> Float[Array, "I P D"]:
        return self.down_proj(activate(self.gate_proj(x), "gelu_tanh") * self.up_proj(x))


class Block(nnx.Module):
    """Attention and MLP, each between two norms and added to the stream."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        def norm() -> GemmaRMSNorm:
            return GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

        self.input_layernorm = norm()
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)
        self.post_feedforward_layernorm = norm()

    def __call__(
        self,
        x: Float[Array, "I P D"],
        across: Float[Array, "I P quarter"],
        down: Float[Array, "I P quarter"],
        key_mask: Bool[Array, "I P"],
    ) -> Float[Array, "I P D"]:
        mixed = self.self_attn(self.input_layernorm(x), across, down, key_mask)
        x = x + self.post_attention_layernorm(mixed)
        mixed = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(mixed)


class Standardize(nnx.Module):
    """Pooled features shifted and scaled, in fp32."""

    def __init__(self, width: int, *, dtype: jnp.dtype):
        self.bias = nnx.Param(jnp.zeros((width,), dtype))
        self.scale = nnx.Param(jnp.ones((width,), dtype))

    def __call__(self, x: Float32[Array, "I M D"]) -> Float32[Array, "I M D"]:
        bias, scale = self.bias[...].astype(jnp.float32), self.scale[...].astype(jnp.float32)
        return (x - bias) * scale


class EmbedVision(nnx.Module):
    """Norm without weight, then the projection to the width of the text decoder."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm = GemmaRMSNorm(width, eps=eps, dtype=dtype, weighted=False)
        self.embedding_projection = linear(width, config.text_hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "I M D"]) -> Float[Array, "I M out"]:
        return self.embedding_projection(self.norm(x))


class VisionTower(nnx.Module):
    """Features of a padded batch of images; sizes are traced, only `I` and `P` are shapes.

    The rows go into the text sequence as they are: the scale of token embeddings is not for them.
    """

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        self.patch_embedder = PatchEmbedder(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)]
        )
        self.standardize = (
            Standardize(config.hidden_size, dtype=dtype) if config.standardize else None
        )
        self.embed_vision = EmbedVision(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        patches: Float[Array, "I P C"],
        rows: Int[Array, " I"],
        columns: Int[Array, " I"],
    ) -> Float[Array, "I M out"]:
        """Image `i` fills the first `rows[i] * columns[i]` of P patches, pixels in [0, 1], and a
        `pool^2`-th of M = ceil(P / pool^2) result rows; the rows after them are finite and without
        meaning.
        """
        config, unit = self.config, self.config.pooling_kernel_size**2
        patches = jnp.pad(patches, ((0, 0), (0, -patches.shape[1] % unit), (0, 0)))
        P = patches.shape[1]
        row, column = patch_grid(P, columns, config.pooling_kernel_size)
        key_mask = jnp.arange(P) < (rows * columns)[:, None]
        x = self.patch_embedder(patches, row, column)
        across = rotary_angles(column, config.rope_theta, config.head_dim // 2)
        down = rotary_angles(row, config.rope_theta, config.head_dim // 2)
        for index, block in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x = block(x, across, down, key_mask)
        return self.embed_vision(self._pool(x))

    def _pool(self, x: Float[Array, "I P D"]) -> Float[Array, "I M D"]:
        """Mean of each run of patches, times the root of the width; fp32, rounded where the
        reference rounds.
        """
        images, P, width = x.shape
        unit = self.config.pooling_kernel_size**2
        mean = x.astype(jnp.float32).reshape(images, P // unit, unit, width).mean(axis=2)
        pooled = mean.astype(x.dtype).astype(jnp.float32) * width**0.5
        if self.standardize is not None:
            pooled = self.standardize(pooled)
        return pooled.astype(x.dtype)


def unpack(made: Mapping[str, Any], pool: int) -> tuple[np.ndarray, int, int]:
    """Patches of one image in merge-block order, fp32 `[rows * columns, C]`, its rows and columns.

    Args:
        made: what the image processor of the family returns for that image alone: `pixel_values`
            `[1, P, C]` and `image_position_ids` `[1, P, 2]`, (column, row) or -1 for padding.
        pool: `pooling_kernel_size`.

    Raises:
        ValueError: there is not exactly one image, or its patches are no whole grid of blocks.
    """
    pixels, positions = np.asarray(made["pixel_values"]), np.asarray(made["image_position_ids"])
    if len(pixels) != 1 or positions.shape != (*pixels.shape[:2], 2):
        raise ValueError(
            f"expected one image, got pixel_values {list(pixels.shape)} and image_position_ids "
            f"{list(positions.shape)}"
        )
    real = (positions[0] >= 0).all(axis=-1)
    column, row = positions[0][real].T
    rows, columns = int(row.max(initial=-1)) + 1, int(column.max(initial=-1)) + 1
    place = (row // pool * (columns // pool) + column // pool) * pool**2
    place += row % pool * pool + column % pool
    whole = rows > 0 and rows % pool == 0 and columns % pool == 0
    if not whole or not np.array_equal(np.sort(place), np.arange(rows * columns)):
        raise ValueError(
            f"{int(real.sum())} patches over {rows} rows and {columns} columns are no whole grid "
            f"of {pool} x {pool} blocks"
        )
    patches = np.empty((rows * columns, pixels.shape[2]), np.float32)
    patches[place] = pixels[0][real]
    return patches, rows, columns


def weight_rules(
    config: VisionConfig, *, hf_prefix: str = "model.", path: Path = ("visual",)
) -> list[Rule]:
    """Every parameter of a `VisionTower` that sits at `path`, and its checkpoint tensor.

    Two parts of the checkpoint make one module: `vision_tower.encoder.layers.0...` is found at
    `(*path, "layers", 0, ...)` and `embed_vision...` at `(*path, "embed_vision", ...)`.
    """
    tower = f"{hf_prefix}vision_tower"
    rules: list[Rule] = []

    def add(hf: str, place: Path, via: Transform) -> None:
        rules.append(Rule(hf, (*path, *place), via))

    embedder, table = "patch_embedder", "position_embedding_table"
    add(f"{tower}.{embedder}.input_proj.weight", (embedder, "input_proj", "kernel"), TRANSPOSE)
    add(f"{tower}.{embedder}.{table}", (embedder, table), IDENTITY)
    for index in range(config.num_hidden_layers):
        layer = f"{tower}.encoder.layers.{index}"
        for part, name in (
            *(("self_attn", f"{letter}_proj") for letter in "qkvo"),
            *(("mlp", name) for name in ("gate_proj", "up_proj", "down_proj")),
        ):
            hf, place = f"{layer}.{part}.{name}", ("layers", index, part, name)
            add(f"{hf}.linear.weight", (*place, "linear", "kernel"), TRANSPOSE)
            for bound in BOUNDS if config.use_clipped_linears else ():
                add(f"{hf}.{bound}", (*place, bound), SCALAR)
        for norm in ("q_norm", "k_norm"):
            place = ("layers", index, "self_attn", norm, "weight")
            add(f"{layer}.self_attn.{norm}.weight", place, IDENTITY)
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):
            add(f"{layer}.{norm}.weight", ("layers", index, norm, "weight"), IDENTITY)
    for name in ("bias", "scale") if config.standardize else ():
        add(f"{tower}.std_{name}", ("standardize", name), IDENTITY)
    name = "embedding_projection"
    add(f"{hf_prefix}embed_vision.{name}.weight", ("embed_vision", name, "kernel"), TRANSPOSE)
    return rules
