"""Qwen3.5 as target: gated delta net and gated attention layers, image tower, lazy commit.

Follows transformers 5.24 `models/qwen3_5/modeling_qwen3_5.py`. The delta-net state is committed
at the start of the next pass: the cache keeps the state before the last block and the block's
records, `commit` only notes how many tokens of it stay. Inputs of the convolution are kept in a
ring by position, as keys are, so nothing of them needs undoing.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmflash_jax.layers.cache import AttentionCache, CachedKeys, empty_cache
from mmflash_jax.layers.capture import join_captured
from mmflash_jax.layers.rotary import mrope_angles
from mmflash_jax.layers.schema import Params, Path, abstract_module
from mmflash_jax.layers.tree import BlockRows, TreeCache, commit_rows
from mmflash_jax.targets.base import TargetOutput
from mmflash_jax.targets.qwen3_5_config import Config
from mmflash_jax.targets.qwen3_5_delta import DeltaCache, DeltaTree, Pass, commit_delta
from mmflash_jax.targets.qwen3_5_network import Model
from mmflash_jax.towers.qwen3_5_vision import weight_rules as tower_rules
from mmflash_jax.weights import (
    SQUEEZE_CONV1D,
    TRANSPOSE,
    Rule,
    attention_projections,
    mlp_projections,
    side_by_side,
)
from pallas_kernels import Kernels
from pallas_kernels.product import logits


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """Layer caches and `pending` int32 `[B]`: tokens of the last block still to be folded in."""

    layers: tuple[AttentionCache | DeltaCache, ...]
    pending: Array


@dataclass(frozen=True)
class Qwen35:
    """The target plan of `Qwen3_5ForConditionalGeneration`; see `targets.base.Target`."""

    config: Config
    dtype: str = "float32"
    kernels: Kernels = "reference"

    SHARDING: ClassVar[tuple[tuple[str, tuple[str | None, ...]], ...]] = (
        (r"(embed_tokens|lm_head)\.embedding$", ("model", None)),
        (r"layers\.\d+\.mlp\.gate_up_proj\.kernel$", (None, "model")),
        (r"layers\.\d+\.self_attn\.qkv_proj\.kernel$", (None, "model")),
        (r"layers\.\d+\.linear_attn\.in_proj\.kernel$", (None, "model")),
        (r"layers\.\d+\.(mlp\.down_proj|self_attn\.o_proj)\.kernel$", ("model", None)),
        (r"layers\.\d+\.linear_attn\.out_proj\.kernel$", ("model", None)),
    )

    @property
    def ignored(self) -> tuple[str, ...]:
        return (r"mtp\.",)

    @property
    def position_axes(self) -> int:
        return 3

    @property
    def image_side(self) -> int:
        return self.config.vision.spatial_merge_size

    @property
    def image_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # The chat template writes vision_start and vision_end itself.
        return (), ()

    @property
    def image_settings(self) -> dict[str, Any]:
        vision = self.config.vision
        return {
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.spatial_merge_size,
        }

    def unpack_image(self, made: Mapping[str, Any]) -> tuple[np.ndarray, int, int]:
        _, rows, columns = (int(size) for size in made["image_grid_thw"][0])
        return np.asarray(made["pixel_values"], np.float32), rows, columns

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], dtype: str, kernels: Kernels = "reference"
    ) -> "Qwen35":
        return cls(Config.from_hf(config), dtype, kernels)

    def abstract_params(self) -> Params:
        return _structure(self)[1]

    def _model(self, params: Params) -> Model:
        return nnx.merge(_structure(self)[0], params)

    def prompt_positions(
        self, ids: np.ndarray, grids: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, int]:
        """M-RoPE positions: text counts on all axes, an image spans rows and columns.

        Follows `get_rope_index` of transformers 5.24. `grids` are token rows and columns.
        """
        positions = np.zeros((3, len(ids)), np.int32)
        is_image = np.asarray(ids) == self.config.image_token_id
        images = iter(grids)
        current = index = 0
        while index < len(ids):
            if is_image[index]:
                rows, columns = next(images)
                count = rows * columns
                row, column = np.divmod(np.arange(count), columns)
                positions[:, index : index + count] = current + np.stack([row * 0, row, column])
                current += max(rows, columns)
            else:
                later = np.flatnonzero(is_image[index:])
                count = int(later[0]) if later.size else len(ids) - index
                positions[:, index : index + count] = current + np.arange(count)
                current += count
            index += count
        return positions, current - len(ids)

    def encode_images(
        self,
        params: Params,
        patches: Float[Array, "I P C"],
        rows: Int[Array, " I"],
        columns: Int[Array, " I"],
    ) -> Float[Array, "I M D"]:
        return self._model(params).visual(patches, rows, columns)

    def embed(
        self,
        params: Params,
        ids: Int[Array, "B T"],
        media: Float[Array, "M D"] | None = None,
        media_idx: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        table = self._model(params).embed_tokens
        if media is None or media_idx is None:
            return table(ids)
        # Placeholder ids are never looked up: some checkpoints keep them outside the table.
        text = table(jnp.where(media_idx < 0, ids, 0))
        placed = media[jnp.maximum(media_idx, 0)].astype(text.dtype)
        return jnp.where((media_idx < 0)[..., None], text, placed)

    # The table has no scale.
    embed_raw = embed

    def logits(self, params: Params, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        return logits(hidden, self.head(params))

    def head(self, params: Params) -> Float[Array, "V D"]:
        model = self._model(params)
        head = model.embed_tokens if self.config.tie_word_embeddings else model.lm_head
        return head.embedding[...]

    def init_cache(self, batch: int, capacity: int, block: int) -> Cache:
        c, dtype = self.config, jnp.dtype(self.dtype)
        heads, taps = c.linear_num_value_heads, c.linear_conv_kernel_dim
        kd, vd = c.linear_key_head_dim, c.linear_value_head_dim

        def layer(kind: str) -> AttentionCache | DeltaCache:
            if kind == "full_attention":
                return empty_cache(batch, c.num_key_value_heads, capacity, c.head_dim, dtype)
            return DeltaCache(
                state=jnp.zeros((batch, heads, kd, vd), jnp.float32),
                updates=jnp.zeros((batch, heads, block, vd), jnp.float32),
                decay=jnp.zeros((batch, heads, block), jnp.float32),
                rows=jnp.zeros((batch, taps - 1 + 2 * block, c.delta_channels), dtype),
            )

        layers = tuple(layer(kind) for kind in c.layer_types)
        return Cache(layers=layers, pending=jnp.zeros((batch,), jnp.int32))

    def prefill(self, params: Params, x: Array, positions: Array, cache: Cache, length: Array,
                count: Array, *, capture: tuple[int, ...]) -> TargetOutput:  # fmt: skip
        return self._run(params, x, positions, cache, length, count, capture, None, decided=True)

    def forward(self, params: Params, x: Array, positions: Array, cache: Cache, length: Array,
                count: Array, *, capture: tuple[int, ...],
                parents: Array | None = None) -> TargetOutput:  # fmt: skip
        return self._run(
            params, x, positions, cache, length, count, capture, parents, decided=False
        )

    def commit(
        self,
        cache: Cache | TreeCache,
        keep: Int[Array, " B"],
        path: Int[Array, "B P"] | None = None,
    ) -> Cache:
        pending = keep.astype(jnp.int32)
        if isinstance(cache, Cache):
            return replace(cache, pending=pending)
        assert path is not None

        def layer(one: BlockRows | DeltaTree) -> AttentionCache | DeltaCache:
            if isinstance(one, BlockRows):
                return commit_rows(one, path, cache.length, keep)
            return commit_delta(one, path, cache.length, keep)

        return Cache(layers=tuple(layer(one) for one in cache.layers), pending=pending)

    def keys_values(self, cache: Cache, kind: str) -> CachedKeys:
        del kind  # There is one: full attention.
        made = [layer for layer in cache.layers if isinstance(layer, AttentionCache)]
        return CachedKeys(cache=made[-1], ring=False)

    def _run(
        self, params: Params, x: Float[Array, "B T D"], positions: Int[Array, "3 B T"],
        cache: Cache, length: Int[Array, " B"], count: Int[Array, " B"],
        capture: tuple[int, ...], parents: Int[Array, "B T"] | None, *, decided: bool,
    ) -> TargetOutput:  # fmt: skip
        c, model = self.config, self._model(params)
        angles = mrope_angles(positions, c.rope_theta, c.rotary_dim, c.mrope_section)
        now = Pass(
            angles=angles, length=length, count=count, pending=cache.pending, parents=parents,
            kernels=self.kernels,
        )  # fmt: skip
        captured: dict[int, Array] = {}
        layers = []
        norms = [*(layer.input_layernorm for layer in model.layers), model.norm]
        normed = norms[0](x)
        for index, (layer, layer_cache) in enumerate(zip(model.layers, cache.layers, strict=True)):
            with jax.named_scope(f"layer_{index}"):
                x, normed, layer_cache = layer(
                    x, normed, layer_cache, now, norms[index + 1], decided=decided
                )
            layers.append(layer_cache)
            if index in capture:
                captured[index] = x
        # Nothing of a drafted block is kept until `commit` says so.
        after = (
            Cache(layers=tuple(layers), pending=jnp.zeros_like(cache.pending))
            if parents is None
            else TreeCache(layers=tuple(layers), length=length)
        )
        features = join_captured(captured, capture, normed)
        return TargetOutput(hidden=normed, features=features, cache=after)

    def weight_rules(self) -> list[Rule]:
        prefix, c = "model.language_model.", self.config
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        rules = [
            Rule(f"{prefix}embed_tokens.weight", ("embed_tokens", "embedding")),
            Rule(f"{prefix}norm.weight", ("norm", "weight")),
        ]
        if not c.tie_word_embeddings:
            rules.append(Rule("lm_head.weight", ("lm_head", "embedding")))
        for index, kind in enumerate(c.layer_types):
            at, path = f"{prefix}layers.{index}.", ("layers", index)
            rules += _layer_rules(at, path, kind)
            rules += mlp_projections(f"{at}mlp.", (*path, "mlp"), c.intermediate_size)
            if kind == "linear_attention":
                rules += self._delta_rules(f"{at}linear_attn.", (*path, "linear_attn"))
            else:
                rules += attention_projections(
                    f"{at}self_attn.", (*path, "self_attn"), 2 * queries, keys
                )
        return rules + tower_rules(c.vision)

    def _delta_rules(self, prefix: str, path: Path) -> list[Rule]:
        """All projections into a delta layer lie in one parameter, in the layer's order."""
        c, heads = self.config, self.config.linear_num_value_heads
        widths = {"qkv": c.delta_channels, "z": heads * c.linear_value_head_dim}
        widths |= {"b": heads, "a": heads}
        joined = {f"{prefix}in_proj_{name}.weight": width for name, width in widths.items()}
        out = Rule(f"{prefix}out_proj.weight", (*path, "out_proj", "kernel"), TRANSPOSE)
        return [*side_by_side(joined, (*path, "in_proj", "kernel")), out]


_PLAIN = {
    "full_attention": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    "linear_attention": ("linear_attn.norm.weight", "linear_attn.A_log", "linear_attn.dt_bias"),
}


def _layer_rules(prefix: str, path: Path, kind: str) -> Iterator[Rule]:
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight", *_PLAIN[kind]):
        yield Rule(f"{prefix}{name}", (*path, *name.split(".")))
    if kind == "linear_attention":
        conv = (*path, "linear_attn", "conv1d")
        yield Rule(f"{prefix}linear_attn.conv1d.weight", conv, SQUEEZE_CONV1D)


@functools.cache
def _structure(target: Qwen35) -> tuple[Any, Params]:
    dtype = jnp.dtype(target.dtype)
    return abstract_module(lambda rngs: Model(target.config, dtype=dtype, rngs=rngs))
