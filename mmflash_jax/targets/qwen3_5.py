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
from jax import lax
from jaxtyping import Array, Float, Int

from mmflash_jax.layers.cache import AttentionCache, empty_cache, write_cache, write_rows
from mmflash_jax.layers.linear import Embedding, linear
from mmflash_jax.layers.mlp import SwiGLU
from mmflash_jax.layers.norm import GatedRMSNorm, ZeroCentredRMSNorm
from mmflash_jax.layers.rotary import apply_rotary, mrope_angles
from mmflash_jax.layers.schema import Params, Path, abstract_module
from mmflash_jax.targets.base import TargetOutput
from mmflash_jax.towers.qwen3_5_vision import VisionConfig, VisionTower
from mmflash_jax.towers.qwen3_5_vision import weight_rules as tower_rules
from mmflash_jax.weights import SQUEEZE_CONV1D, TRANSPOSE, Rule
from mmflash_jax.weights.hf_config import ConfigError, expect, require, rope_theta
from pallas_kernels import Kernels, block_attention, gated_delta_chunked, gated_delta_step
from pallas_kernels.gated_delta import (
    convolve,
    fold_pending,
    from_ring,
    gates,
    queries_keys_values,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The fields of `config.json` that decide the computation; names are the file's own."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    layer_types: tuple[str, ...]
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    rope_theta: float
    rotary_dim: int
    mrope_section: tuple[int, int, int]
    max_position_embeddings: int
    tie_word_embeddings: bool
    image_token_id: int
    vision: VisionConfig

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def delta_channels(self) -> int:
        """Channels of the delta net's convolution: queries, keys and values."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """From a `Qwen3_5ForConditionalGeneration` config.

        Raises:
            ConfigError: a field is missing, contradictory or asks for what is not implemented.
        """
        where = "config.json"
        text = require(config, "text_config", where)
        inside = f"{where} text_config"
        expect(text, inside, hidden_act=["silu"], attention_bias=[False])
        names = [
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "linear_conv_kernel_dim",
            "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
            "linear_num_value_heads", "max_position_embeddings",
        ]  # fmt: skip
        fields = {name: require(text, name, inside) for name in names}
        rope = require(text, "rope_parameters", inside)
        rotary = int(fields["head_dim"] * rope.get("partial_rotary_factor", 0.25))
        section = tuple(require(rope, "mrope_section", f"{inside} rope_parameters"))
        if len(section) != 3 or sum(section) != rotary // 2:
            raise ConfigError(
                f"{inside}: mrope_section {list(section)} must be three numbers whose sum is half "
                f"the rotary width, {rotary // 2}"
            )
        expect(rope, f"{inside} rope_parameters", mrope_interleaved=[True])
        return cls(
            **fields,
            layer_types=_layer_types(text, inside),
            rope_theta=rope_theta(text, inside),
            rotary_dim=rotary,
            mrope_section=section,
            tie_word_embeddings=_tied(config, text),
            image_token_id=require(config, "image_token_id", where),
            vision=VisionConfig.from_hf(require(config, "vision_config", where)),
        )


def _layer_types(text: Mapping[str, Any], where: str) -> tuple[str, ...]:
    layers = require(text, "num_hidden_layers", where)
    types = text.get("layer_types")
    if types is None:
        every = require(text, "full_attention_interval", where)
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    unknown = set(types) - {"linear_attention", "full_attention"}
    if len(types) != layers or unknown:
        raise ConfigError(
            f"{where}: layer_types has {len(types)} entries for num_hidden_layers {layers}"
            + (f" and unknown kinds {sorted(unknown)}" if unknown else "")
        )
    return tuple(types)


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    # transformers reads the top level for the whole model; older files say it in the text part.
    if "tie_word_embeddings" in config:
        return bool(config["tie_word_embeddings"])
    return bool(text.get("tie_word_embeddings", False))


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeltaCache:
    """State before the last block, that block's records and the convolution's inputs.

    state: fp32 `[B, vh, kd, vd]`.
    updates, decay: fp32 records `[B, vh, block, vd]`, `[B, vh, block]`.
    rows: `[B, taps - 1 + 2 * block, channels]`, a ring; slot p modulo its size holds position p.
    """

    state: Array
    updates: Array
    decay: Array
    rows: Array


@no_type_check  # JAX rebuilds it around things that are no arrays.
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """Layer caches and `pending` int32 `[B]`: tokens of the last block still to be folded in."""

    layers: tuple[AttentionCache | DeltaCache, ...]
    pending: Array


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """What every layer of one pass needs: angles `[B, T, half]`, start and number of tokens."""

    angles: Array
    length: Array
    count: Array
    pending: Array
    kernels: Kernels


class GatedAttention(nnx.Module):
    """Full attention with normed queries and keys and a sigmoid gate on its output."""

    def __init__(self, config: Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.kv_heads = config.num_key_value_heads
        width, inner = config.hidden_size, self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        self.q_proj = linear(width, 2 * inner, dtype=dtype, rngs=rngs)
        self.k_proj = linear(width, kv, dtype=dtype, rngs=rngs)
        self.v_proj = linear(width, kv, dtype=dtype, rngs=rngs)
        self.o_proj = linear(inner, width, dtype=dtype, rngs=rngs)
        self.q_norm = ZeroCentredRMSNorm(self.head_dim, eps=config.rms_norm_eps, dtype=dtype)
        self.k_norm = ZeroCentredRMSNorm(self.head_dim, eps=config.rms_norm_eps, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T D"], cache: AttentionCache, now: _Pass
    ) -> tuple[Float[Array, "B T D"], AttentionCache]:
        B, T, _ = x.shape
        # Query and gate sit side by side inside each head, not in two halves of the projection.
        q, gate = jnp.split(self.q_proj(x).reshape(B, T, self.heads, -1), 2, axis=-1)
        k = self.k_proj(x).reshape(B, T, self.kv_heads, -1)
        v = self.v_proj(x).reshape(B, T, self.kv_heads, -1)
        q = apply_rotary(self.q_norm(q), now.angles)
        k = apply_rotary(self.k_norm(k), now.angles)
        mixed = block_attention(
            q, k_cache=cache.k, v_cache=cache.v, k_block=k, v_block=v, length=now.length,
            scale=self.head_dim**-0.5, causal=True, kernels=now.kernels,
        )  # fmt: skip
        gated = mixed.reshape(B, T, -1) * jax.nn.sigmoid(gate.reshape(B, T, -1))
        return self.o_proj(gated), write_cache(cache, k, v, now.length, now.count)


class GatedDeltaNet(nnx.Module):
    """Short convolution, gated delta rule, gated norm. Positions play no part."""

    def __init__(self, config: Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.key_heads, self.key_dim = config.linear_num_key_heads, config.linear_key_head_dim
        self.value_heads = config.linear_num_value_heads
        self.value_dim = config.linear_value_head_dim
        self.taps = config.linear_conv_kernel_dim
        width, values = config.hidden_size, self.value_heads * self.value_dim
        self.in_proj_qkv = linear(width, config.delta_channels, dtype=dtype, rngs=rngs)
        self.in_proj_z = linear(width, values, dtype=dtype, rngs=rngs)
        self.in_proj_b = linear(width, self.value_heads, dtype=dtype, rngs=rngs)
        self.in_proj_a = linear(width, self.value_heads, dtype=dtype, rngs=rngs)
        self.conv1d = nnx.Param(jnp.zeros((self.taps, config.delta_channels), dtype))
        # Checkpoints keep the decay parameters wide; a rounded A_log shifts every step's decay.
        self.A_log = nnx.Param(jnp.zeros((self.value_heads,), jnp.float32))
        self.dt_bias = nnx.Param(jnp.ones((self.value_heads,), jnp.float32))
        self.norm = GatedRMSNorm(self.value_dim, eps=config.rms_norm_eps)
        self.out_proj = linear(values, width, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], cache: DeltaCache, now: _Pass, *, decided: bool
    ) -> tuple[Float[Array, "B T D"], DeltaCache]:
        """One pass; `decided` tokens enter the state at once, others leave records behind."""
        B, T, _ = x.shape
        run = self._absorb if decided else self._verify
        qkv, z, a = self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_a(x)
        # XLA:GPU would join these two small products and copy their weights together each time.
        x, a = lax.optimization_barrier((x, a))
        out, cache = run(qkv, a, self.in_proj_b(x), cache, now)
        z = z.reshape(B, T, self.value_heads, self.value_dim)
        return self.out_proj(self.norm(out, z).reshape(B, T, -1)), cache

    def _verify(
        self, qkv: Float[Array, "B T channels"], a: Float[Array, "B T vh"],
        b: Float[Array, "B T vh"], cache: DeltaCache, now: _Pass,
    ) -> tuple[Float[Array, "B T vh vd"], DeltaCache]:  # fmt: skip
        """Fold in what stayed of the last block, then run this one without deciding on it."""
        rows = _write_ring(cache.rows, qkv, now)
        # Padding makes up for a block narrower than the cache's; no real token looks that far.
        T, block = qkv.shape[1], cache.updates.shape[2]
        a, b = (jnp.pad(x, ((0, 0), (0, block - T), (0, 0))) for x in (a, b))
        out, state, updates, decay = gated_delta_step(
            rows, self.conv1d[...], a, b, self.A_log[...], self.dt_bias[...], cache.state,
            cache.updates, cache.decay, now.length, now.pending, key_heads=self.key_heads,
            kernels=now.kernels,
        )  # fmt: skip
        return out[:, :T], DeltaCache(state=state, updates=updates, decay=decay, rows=rows)

    def _absorb(
        self, qkv: Float[Array, "B T channels"], a: Float[Array, "B T vh"],
        b: Float[Array, "B T vh"], cache: DeltaCache, now: _Pass,
    ) -> tuple[Float[Array, "B T vh vd"], DeltaCache]:  # fmt: skip
        """Run decided tokens in chunks; nothing is pending afterwards."""
        kernel = self.conv1d[...]
        state = fold_pending(
            cache.rows, kernel, cache.state, cache.updates, cache.decay, now.length, now.pending,
            key_heads=self.key_heads,
        )  # fmt: skip
        tail = from_ring(cache.rows, now.length - (self.taps - 1), self.taps - 1)
        mixed = convolve(jnp.concatenate([tail, qkv], axis=1), kernel)
        g, beta = gates(a, b, self.A_log[...], self.dt_bias[...])
        # A padded token must neither decay nor write the state.
        real = (jnp.arange(qkv.shape[1]) < now.count[:, None])[..., None]
        g, beta = jnp.where(real, g, 0.0), jnp.where(real, beta, 0.0)
        q, k, v = queries_keys_values(mixed, self.key_heads, state)
        out, state = gated_delta_chunked(q, k, v, g, beta, state)
        return out.astype(qkv.dtype), DeltaCache(
            state=state,
            updates=jnp.zeros_like(cache.updates),
            decay=jnp.zeros_like(cache.decay),
            rows=_write_ring(cache.rows, qkv, now),
        )


def _write_ring(
    rows: Float[Array, "B slots channels"], new: Float[Array, "B T channels"], now: _Pass
) -> Float[Array, "B slots channels"]:
    return write_rows(rows[:, None], new[:, :, None], now.length, now.count, ring=True)[:, 0]


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
        self, x: Float[Array, "B T D"], cache: Any, now: _Pass, *, decided: bool
    ) -> tuple[Float[Array, "B T D"], Any]:
        normed = self.input_layernorm(x)
        if isinstance(cache, AttentionCache):
            mixed, cache = self.self_attn(normed, cache, now)
        else:
            mixed, cache = self.linear_attn(normed, cache, now, decided=decided)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), cache


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


@dataclass(frozen=True)
class Qwen35:
    """The target plan of `Qwen3_5ForConditionalGeneration`; see `targets.base.Target`."""

    config: Config
    dtype: str = "float32"
    kernels: Kernels = "reference"

    SHARDING: ClassVar[tuple[tuple[str, tuple[str | None, ...]], ...]] = (
        (r"(embed_tokens|lm_head)\.embedding$", ("model", None)),
        (r"layers\.\d+\.mlp\.(gate|up)_proj\.kernel$", (None, "model")),
        (r"layers\.\d+\.self_attn\.[qkv]_proj\.kernel$", (None, "model")),
        (r"layers\.\d+\.linear_attn\.in_proj_(qkv|z)\.kernel$", (None, "model")),
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

    def embed_raw(self, params: Params, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self._model(params).embed_tokens(ids)

    def logits(self, params: Params, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        return self.logits_raw(params, hidden)

    def logits_raw(self, params: Params, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        model = self._model(params)
        head = model.embed_tokens if self.config.tie_word_embeddings else model.lm_head
        return head.attend(hidden)

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
        return self._run(params, x, positions, cache, length, count, capture, decided=True)

    def forward(self, params: Params, x: Array, positions: Array, cache: Cache, length: Array,
                count: Array, *, capture: tuple[int, ...]) -> TargetOutput:  # fmt: skip
        return self._run(params, x, positions, cache, length, count, capture, decided=False)

    def commit(self, cache: Cache, keep: Int[Array, " B"]) -> Cache:
        return replace(cache, pending=keep.astype(jnp.int32))

    def _run(
        self, params: Params, x: Float[Array, "B T D"], positions: Int[Array, "3 B T"],
        cache: Cache, length: Int[Array, " B"], count: Int[Array, " B"],
        capture: tuple[int, ...], *, decided: bool,
    ) -> TargetOutput:  # fmt: skip
        c, model = self.config, self._model(params)
        angles = mrope_angles(positions, c.rope_theta, c.rotary_dim, c.mrope_section)
        now = _Pass(
            angles=angles, length=length, count=count, pending=cache.pending, kernels=self.kernels
        )
        captured: dict[int, Array] = {}
        layers = []
        for index, (layer, layer_cache) in enumerate(zip(model.layers, cache.layers, strict=True)):
            with jax.named_scope(f"layer_{index}"):
                x, layer_cache = layer(x, layer_cache, now, decided=decided)
            layers.append(layer_cache)
            if index in capture:
                captured[index] = x
        features = [captured[index] for index in capture] or [x[..., :0]]
        # Nothing of a drafted block is kept until `commit` says so.
        after = Cache(layers=tuple(layers), pending=jnp.zeros_like(cache.pending))
        return TargetOutput(
            hidden=model.norm(x), features=jnp.concatenate(features, axis=-1), cache=after
        )

    def weight_rules(self) -> list[Rule]:
        prefix = "model.language_model."
        rules = [
            Rule(f"{prefix}embed_tokens.weight", ("embed_tokens", "embedding")),
            Rule(f"{prefix}norm.weight", ("norm", "weight")),
        ]
        if not self.config.tie_word_embeddings:
            rules.append(Rule("lm_head.weight", ("lm_head", "embedding")))
        for index, kind in enumerate(self.config.layer_types):
            rules += _layer_rules(f"{prefix}layers.{index}.", ("layers", index), kind)
        return rules + tower_rules(self.config.vision)


_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_LINEAR = {
    "full_attention": tuple(f"self_attn.{name}_proj" for name in "qkvo"),
    "linear_attention": tuple(
        f"linear_attn.{name}"
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    ),
}
_PLAIN = {
    "full_attention": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    "linear_attention": ("linear_attn.norm.weight", "linear_attn.A_log", "linear_attn.dt_bias"),
}


def _layer_rules(prefix: str, path: Path, kind: str) -> Iterator[Rule]:
    for name in (*_MLP, *_LINEAR[kind]):
        yield Rule(f"{prefix}{name}.weight", (*path, *name.split("."), "kernel"), TRANSPOSE)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight", *_PLAIN[kind]):
        yield Rule(f"{prefix}{name}", (*path, *name.split(".")))
    if kind == "linear_attention":
        conv = (*path, "linear_attn", "conv1d")
        yield Rule(f"{prefix}linear_attn.conv1d.weight", conv, SQUEEZE_CONV1D)


@functools.cache
def _structure(target: Qwen35) -> tuple[Any, Params]:
    dtype = jnp.dtype(target.dtype)
    return abstract_module(lambda rngs: Model(target.config, dtype=dtype, rngs=rngs))
