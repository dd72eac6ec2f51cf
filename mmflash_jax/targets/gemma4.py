"""Gemma 4 (E2B, E4B) as target: sliding and full attention, per-layer embeddings, shared keys.

Follows transformers 5.24 `models/gemma4/modeling_gemma4.py`. Sliding layers keep a ring of
`window + block` slots; rejected tokens need no undoing, since the next pass starts at the committed
length (`pallas_kernels.write_rows`). The last layers make no keys and values of their own and read
those of an earlier layer, so the cache has entries for the makers only.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmflash_jax.layers.cache import (
    AttentionCache,
    CachedKeys,
    empty_cache,
    may_write_first,
    write_cache,
)
from mmflash_jax.layers.capture import join_captured
from mmflash_jax.layers.rotary import proportional_angles
from mmflash_jax.layers.schema import Params, Path, abstract_module
from mmflash_jax.layers.tree import BlockRows, TreeCache, commit_rows
from mmflash_jax.targets.base import TargetOutput
from mmflash_jax.targets.gemma4_config import Config, Layer
from mmflash_jax.targets.gemma4_network import Model, times
from mmflash_jax.towers.gemma4_vision import unpack
from mmflash_jax.towers.gemma4_vision import weight_rules as tower_rules
from mmflash_jax.weights import TRANSPOSE, Rule, attention_projections, mlp_projections
from mmflash_jax.weights.gemma4_layers import Rotary
from pallas_kernels import Kernels
from pallas_kernels.product import logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Embedded:
    """Input of a pass: the stream `[B, T, D]` and what each layer adds, `[B, T, L, E]`."""

    x: Array
    per_layer: Array


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """Keys and values of the layers that make them, by layer order."""

    layers: tuple[AttentionCache, ...]


@dataclass(frozen=True)
class Gemma4:
    """The target plan of `Gemma4ForConditionalGeneration`; see `targets.base.Target`."""

    config: Config
    dtype: str = "float32"
    kernels: Kernels = "reference"

    SHARDING: ClassVar[tuple[tuple[str, tuple[str | None, ...]], ...]] = (
        (r"(embed_tokens|embed_tokens_per_layer)\.embedding$", ("model", None)),
        (r"layers\.\d+\.mlp\.gate_up_proj\.kernel$", (None, "model")),
        (r"layers\.\d+\.self_attn\.qkv_proj\.kernel$", (None, "model")),
        (r"layers\.\d+\.(mlp\.down_proj|self_attn\.o_proj)\.kernel$", ("model", None)),
    )

    @property
    def ignored(self) -> tuple[str, ...]:
        """Audio, and keys and values that released files hold for layers without use for them."""
        readers = [i for i, layer in enumerate(self.config.layers) if layer.source != i]
        unused = "|".join(map(str, readers)) or "none"
        return (
            r"model\.(audio_tower|embed_audio)\.",
            rf"model\.language_model\.layers\.({unused})\.self_attn\.(k_proj|v_proj|k_norm)\.",
        )

    @property
    def position_axes(self) -> int:
        return 1

    @property
    def image_side(self) -> int:
        return self.config.vision.pooling_kernel_size

    @property
    def image_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.config.boi_token_id,), (self.config.eoi_token_id,)

    @property
    def image_settings(self) -> dict[str, Any]:
        vision = self.config.vision
        return {
            "patch_size": vision.patch_size,
            "pooling_kernel_size": vision.pooling_kernel_size,
        }

    def unpack_image(self, made: Mapping[str, Any]) -> tuple[np.ndarray, int, int]:
        return unpack(made, self.config.vision.pooling_kernel_size)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], dtype: str, kernels: Kernels = "reference"
    ) -> "Gemma4":
        return cls(Config.from_hf(config), dtype, kernels)

    def abstract_params(self) -> Params:
        return _structure(self)[1]

    def _model(self, params: Params) -> Model:
        return nnx.merge(_structure(self)[0], params)

    def prompt_positions(
        self, ids: np.ndarray, grids: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, int]:
        """Plain 1-D positions: an image's tokens count like any others."""
        del grids
        return np.arange(len(ids), dtype=np.int32)[None], 0

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
    ) -> Embedded:
        """Scaled text rows, unscaled media rows, and per-layer inputs made from both.

        A media token takes the per-layer row of the padding token: its own id means nothing.
        """
        c, model, dtype = self.config, self._model(params), jnp.dtype(self.dtype)
        is_text = jnp.ones(ids.shape, bool) if media_idx is None else media_idx < 0
        known = jnp.where(is_text, ids, c.pad_token_id)
        # The scale is rounded to the dtype of the weights first, 50.5 for E4B in bf16.
        x = model.embed_tokens(known) * jnp.asarray(c.hidden_size**0.5, dtype)
        if media is not None and media_idx is not None:
            placed = media[jnp.maximum(media_idx, 0)].astype(dtype)
            x = jnp.where(is_text[..., None], x, placed)
        shape = (*ids.shape, c.num_hidden_layers, c.hidden_size_per_layer_input)
        own = model.embed_tokens_per_layer(known) * jnp.asarray(shape[-1] ** 0.5, dtype)
        mixed = times(model.per_layer_model_projection(x), c.hidden_size**-0.5)
        mixed = model.per_layer_projection_norm(mixed.reshape(shape))
        return Embedded(x=x, per_layer=times(mixed + own.reshape(shape), 2.0**-0.5))

    def embed_raw(
        self,
        params: Params,
        ids: Int[Array, "B T"],
        media: Float[Array, "M D"] | None = None,
        media_idx: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        table = self._model(params).embed_tokens
        if media is None or media_idx is None:
            return table(ids)
        text = table(jnp.where(media_idx < 0, ids, self.config.pad_token_id))
        placed = times(media[jnp.maximum(media_idx, 0)], self.config.hidden_size**-0.5)
        return jnp.where((media_idx < 0)[..., None], text, placed.astype(text.dtype))

    def logits(self, params: Params, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        """Soft cap in fp32; transformers caps in the dtype of the weights, where logits tie."""
        cap = self.config.final_logit_softcapping
        made = logits(hidden, self.head(params))
        return made if cap is None else cap * jnp.tanh(made / cap)

    def head(self, params: Params) -> Float[Array, "V D"]:
        return self._model(params).embed_tokens.embedding[...]

    def init_cache(self, batch: int, capacity: int, block: int) -> Cache:
        def layer(layer: Layer) -> AttentionCache:
            slots = capacity if layer.window is None else layer.window + block
            return empty_cache(batch, layer.kv_heads, slots, layer.head_dim, jnp.dtype(self.dtype))

        return Cache(layers=tuple(map(layer, self._makers)))

    def prefill(
        self, params: Params, x: Embedded, positions: Int[Array, "1 B T"], cache: Cache,
        length: Int[Array, " B"], count: Int[Array, " B"], *, capture: tuple[int, ...],
    ) -> TargetOutput:  # fmt: skip
        return self.forward(params, x, positions, cache, length, count, capture=capture)

    def forward(
        self, params: Params, x: Embedded, positions: Int[Array, "1 B T"], cache: Cache,
        length: Int[Array, " B"], count: Int[Array, " B"], *, capture: tuple[int, ...],
        parents: Int[Array, "B T"] | None = None,
    ) -> TargetOutput:  # fmt: skip
        """A drafted block is run like decided tokens: the committed length alone says what
        counts."""
        model = self._model(params)
        angles = {
            (rotary, head_dim): proportional_angles(
                positions[0], rotary.theta, head_dim, rotary.share
            )
            for rotary, head_dim in {_rotary_of(layer) for layer in self.config.layers}
        }
        own = iter(cache.layers)
        contexts: dict[int, BlockRows] = {}
        captured: dict[int, Array] = {}
        norms = [*(layer.input_layernorm for layer in model.layers), model.norm]
        stream, normed = x.x, norms[0](x.x)
        for index, layer in enumerate(self.config.layers):
            is_maker = layer.source == index
            read = next(own) if is_maker else contexts[layer.source]
            with jax.named_scope(f"layer_{index}"):
                stream, normed, context = model.layers[index](
                    stream, normed, x.per_layer[:, :, index], angles[_rotary_of(layer)], read,
                    length, count, parents, norms[index + 1], self.kernels,
                )  # fmt: skip
            if is_maker:
                contexts[index] = context
            if index in capture:
                captured[index] = stream
        made = tuple(contexts.values())
        return TargetOutput(
            hidden=normed,
            features=join_captured(captured, capture, normed),
            cache=self._written(made, length, count)
            if parents is None
            else TreeCache(layers=made, length=length),
        )

    def _written(
        self, made: tuple[BlockRows, ...], length: Int[Array, " B"], count: Int[Array, " B"]
    ) -> Cache:
        """Caches after the first `count` tokens of a chain; most layers have written theirs."""

        def written(rows: BlockRows, layer: Layer) -> AttentionCache:
            if may_write_first(rows.cache.k.shape[2], rows.k.shape[1], layer.window):
                return rows.cache
            return write_cache(rows.cache, rows.k, rows.v, length, count, ring=True)

        return Cache(layers=tuple(map(written, made, self._makers)))

    @property
    def _makers(self) -> tuple[Layer, ...]:
        """The layers that make keys and values."""
        layers = enumerate(self.config.layers)
        return tuple(layer for index, layer in layers if layer.source == index)

    def commit(
        self,
        cache: Cache | TreeCache,
        keep: Int[Array, " B"],
        path: Int[Array, "B P"] | None = None,
    ) -> Cache:
        if isinstance(cache, Cache):
            return cache
        assert path is not None
        return Cache(
            layers=tuple(
                commit_rows(rows, path, cache.length, keep, ring=layer.window is not None)
                for rows, layer in zip(cache.layers, self._makers, strict=True)
            )
        )

    def keys_values(self, cache: Cache, kind: str) -> CachedKeys:
        ring = kind == "sliding_attention"
        makers = enumerate(self._makers)
        last = max(i for i, layer in makers if (layer.window is not None) == ring)
        return CachedKeys(cache=cache.layers[last], ring=ring)

    def weight_rules(self) -> list[Rule]:
        prefix = "model.language_model."
        rules = [
            Rule(f"{prefix}embed_tokens.weight", ("embed_tokens", "embedding")),
            Rule(f"{prefix}embed_tokens_per_layer.weight", ("embed_tokens_per_layer", "embedding")),
            Rule(
                f"{prefix}per_layer_model_projection.weight",
                ("per_layer_model_projection", "kernel"),
                TRANSPOSE,
            ),
            Rule(
                f"{prefix}per_layer_projection_norm.weight", ("per_layer_projection_norm", "weight")
            ),
            Rule(f"{prefix}norm.weight", ("norm", "weight")),
        ]
        for index, layer in enumerate(self.config.layers):
            makes_keys = layer.source == index
            at, path = f"{prefix}layers.{index}.", ("layers", index)
            rules += _layer_rules(at, path, makes_keys)
            rules += mlp_projections(f"{at}mlp.", (*path, "mlp"), layer.intermediate_size)
            queries = self.config.num_attention_heads * layer.head_dim
            keys = layer.kv_heads * layer.head_dim if makes_keys else 0
            rules += attention_projections(f"{at}self_attn.", (*path, "self_attn"), queries, keys)
        return rules + tower_rules(self.config.vision, path=("visual",))


def _rotary_of(layer: Layer) -> tuple[Rotary, int]:
    """What decides a layer's rotary angles."""
    return layer.rotary, layer.head_dim


_LINEAR = ("per_layer_input_gate", "per_layer_projection")
_PLAIN = (
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight",
    "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight",
    "post_per_layer_input_norm.weight", "layer_scalar",
)  # fmt: skip


def _layer_rules(prefix: str, path: Path, makes_keys: bool) -> Iterator[Rule]:
    plain = _PLAIN
    if makes_keys:
        plain += ("self_attn.k_norm.weight",)
    for name in _LINEAR:
        yield Rule(f"{prefix}{name}.weight", (*path, *name.split("."), "kernel"), TRANSPOSE)
    for name in plain:
        yield Rule(f"{prefix}{name}", (*path, *name.split(".")))


@functools.cache
def _structure(target: Gemma4) -> tuple[Any, Params]:
    dtype = jnp.dtype(target.dtype)
    return abstract_module(lambda rngs: Model(target.config, dtype=dtype, rngs=rngs))
