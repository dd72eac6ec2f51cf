"""The training forward of Gemma 4 for one picture size."""

import torch
from torch import Tensor
from torch.nn import functional

from mmflash_jax.demo.recipe.gemma4_geometry import (
    pool,
    sliding_mask,
    text_angles,
    to_patches,
    vision_angles,
)
from mmflash_jax.demo.recipe.gemma4_shape import (
    CLIP_NAMES,
    EMBEDDER_PREFIX,
    TOWER_PREFIX,
    VISION_LINEARS,
    Gemma4Shape,
)
from mmflash_jax.demo.recipe.network import (
    TEXT_PREFIX,
    TargetNetwork,
    cosine_sine,
    inverse_rms,
    project,
    rotate_half,
)

KeyValue = tuple[Tensor, Tensor]

_SANDWICH_NAMES = tuple(
    f"{name}_layernorm.weight"
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
)
_SHARING_NAMES = tuple(f"self_attn.{name}.weight" for name in ("q_proj", "q_norm", "o_proj"))
_OWN_NAMES = tuple(f"self_attn.{name}.weight" for name in ("k_proj", "k_norm", "v_proj"))
_TAIL_NAMES = (
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "per_layer_input_gate.weight",
    "per_layer_projection.weight",
    "post_per_layer_input_norm.weight",
    "layer_scalar",
)
_VISION_NAMES = (
    *_SANDWICH_NAMES,
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    *(f"{linear}.{part}" for linear in VISION_LINEARS for part in ("linear.weight", *CLIP_NAMES)),
)


def rms_norm(inputs: Tensor, weight: Tensor | None = None) -> Tensor:
    inputs = inputs.float()
    normed = inputs * inverse_rms(inputs)
    return normed if weight is None else normed * weight


def _gelu(inputs: Tensor) -> Tensor:
    return functional.gelu(inputs, approximate="tanh")


def attention(
    hidden: Tensor,
    cosine: Tensor,
    sine: Tensor,
    mask: Tensor | None,
    shared: KeyValue | None,
    weights: dict[str, Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, KeyValue]:
    """The attention half of a decoder layer, and the keys and values it used.

    Without a mask it is causal; with `shared` it has no keys and values of its own.
    """
    batch, length, _ = hidden.shape
    normed = rms_norm(hidden, weights["input_layernorm.weight"]).to(dtype)

    def heads(name: str) -> Tensor:
        projected = project(normed, weights[f"self_attn.{name}_proj.weight"])
        return projected.view(batch, length, -1, cosine.shape[-1])

    def rotated(name: str) -> Tensor:
        turned = rms_norm(heads(name), weights[f"self_attn.{name}_norm.weight"]).transpose(1, 2)
        return (turned * cosine + rotate_half(turned) * sine).to(dtype)

    query = rotated("q")
    if shared is None:
        shared = rotated("k"), rms_norm(heads("v")).transpose(1, 2).to(dtype)
    groups = query.shape[1] // shared[0].shape[1]
    key, value = (part.repeat_interleave(groups, 1) for part in shared)
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=1.0
    )
    out = project(out.transpose(1, 2).flatten(2), weights["self_attn.o_proj.weight"])
    return hidden + rms_norm(out, weights["post_attention_layernorm.weight"]), shared


def layer_tail(
    hidden: Tensor, per_layer: Tensor, weights: dict[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """The rest of a decoder layer, the same for all sorts: MLP, per-layer input, scalar."""
    normed = rms_norm(hidden, weights["pre_feedforward_layernorm.weight"]).to(dtype)
    gated = _gelu(project(normed, weights["mlp.gate_proj.weight"]))
    gated = gated * project(normed, weights["mlp.up_proj.weight"])
    out = project(gated, weights["mlp.down_proj.weight"])
    hidden = hidden + rms_norm(out, weights["post_feedforward_layernorm.weight"])
    gate = _gelu(project(hidden.to(dtype), weights["per_layer_input_gate.weight"]))
    out = project(gate * per_layer.to(dtype), weights["per_layer_projection.weight"])
    hidden = hidden + rms_norm(out, weights["post_per_layer_input_norm.weight"])
    return hidden * weights["layer_scalar"]


def per_layer_inputs(
    hidden: Tensor, token_part: Tensor, projection: Tensor, norm: Tensor, dtype: torch.dtype
) -> Tensor:
    """Every layer's extra input, [batch, length, layers, per_layer_width].

    It has a part looked up by token and a part made from what enters the first layer.
    """
    by_layer = (*hidden.shape[:2], -1, norm.shape[0])
    context = project(hidden.to(dtype), projection).float() * hidden.shape[-1] ** -0.5
    context = rms_norm(context.view(by_layer), norm)
    return (context + token_part.view(by_layer) * norm.shape[0] ** 0.5) * 2**-0.5


def vision_layer(
    hidden: Tensor,
    cosine: Tensor,
    sine: Tensor,
    weights: dict[str, Tensor],
    heads: int,
    dtype: torch.dtype,
) -> Tensor:
    """A block of the image tower; its linear maps clip what goes in and what comes out."""
    batch, patches, _ = hidden.shape

    def clipped(inputs: Tensor, name: str) -> Tensor:
        low, high, out_low, out_high = (weights[f"{name}.{bound}"] for bound in CLIP_NAMES)
        inputs = project(inputs.clamp(low, high), weights[f"{name}.linear.weight"])
        return inputs.clamp(out_low, out_high)

    normed = rms_norm(hidden, weights["input_layernorm.weight"]).to(dtype)
    query, key, value = (
        clipped(normed, f"self_attn.{name}_proj").view(batch, patches, heads, -1)
        for name in ("q", "k", "v")
    )

    def rotated(tensor: Tensor, name: str) -> Tensor:
        turned = rms_norm(tensor, weights[f"self_attn.{name}_norm.weight"])
        # The two halves of a head turn by column and by row.
        turned = turned.transpose(1, 2).unflatten(-1, (2, -1))
        return (turned * cosine + rotate_half(turned) * sine).flatten(-2).to(dtype)

    out = functional.scaled_dot_product_attention(
        rotated(query, "q"),
        rotated(key, "k"),
        rms_norm(value).transpose(1, 2).to(dtype),
        scale=1.0,
    )
    out = clipped(out.transpose(1, 2).flatten(2), "self_attn.o_proj")
    hidden = hidden + rms_norm(out, weights["post_attention_layernorm.weight"])
    normed = rms_norm(hidden, weights["pre_feedforward_layernorm.weight"]).to(dtype)
    gated = _gelu(clipped(normed, "mlp.gate_proj")) * clipped(normed, "mlp.up_proj")
    out = clipped(gated, "mlp.down_proj")
    return hidden + rms_norm(out, weights["post_feedforward_layernorm.weight"])


class Gemma4Network(TargetNetwork[Gemma4Shape]):
    """Sliding and full layers with per-layer inputs, the last ones without keys of their own."""

    constant_suffixes = CLIP_NAMES

    def __init__(
        self,
        weights: dict[str, Tensor],
        shape: Gemma4Shape,
        prefix_length: int,
        length: int,
        device: str,
        dtype: torch.dtype,
        compiled: bool,
    ) -> None:
        super().__init__(weights, shape, prefix_length, length, device, dtype, compiled)
        self._attention = self._wrap(attention)
        self._layer_tail = self._wrap(layer_tail)
        self._per_layer_inputs = self._wrap(per_layer_inputs)
        self._vision_layer = self._wrap(vision_layer)
        self._vision_rope = tuple(part.to(device) for part in cosine_sine(vision_angles(shape)))
        self._text_rope = {
            full: tuple(part.to(device) for part in cosine_sine(text_angles(shape, length, full)))
            for full in (False, True)
        }
        self._masks = {False: sliding_mask(shape, length).to(device), True: None}
        self._is_image = torch.zeros(length, dtype=torch.bool, device=device)
        self._is_image[prefix_length : prefix_length + shape.image_tokens] = True

    def vision(self, images: Tensor) -> Tensor:
        shape = self.shape
        patches = to_patches(images, shape).to(self.dtype)
        embedder = f"{TOWER_PREFIX}patch_embedder."
        hidden = project(patches, self.weights[f"{embedder}input_proj.weight"]).float()
        by_column, by_row = self.weights[f"{embedder}position_embedding_table"]
        rows, columns = shape.grid
        positions = by_row[:rows, None] + by_column[None, :columns]
        hidden = hidden + positions.flatten(0, 1)
        for layer in range(shape.vision_layers):
            block = self._block(f"{TOWER_PREFIX}encoder.layers.{layer}.", _VISION_NAMES)
            hidden = self._vision_layer(
                hidden, *self._vision_rope, block, shape.vision_heads, self.dtype
            )
        pooled = rms_norm(pool(hidden, shape) * shape.vision_width**0.5).to(self.dtype)
        return project(
            pooled, self.weights[f"{EMBEDDER_PREFIX}embedding_projection.weight"]
        ).float()

    def text(self, ids: Tensor, features: Tensor) -> Tensor:
        shape = self.shape
        # Where the picture is, the per-layer part is looked up for the pad, whose id is 0.
        hidden, token_part = self._look_up_both(ids.masked_fill(self._is_image, 0))
        hidden = self._with_image(hidden * shape.width**0.5, features)
        projection = self.weights[f"{TEXT_PREFIX}per_layer_model_projection.weight"]
        norm = self.weights[f"{TEXT_PREFIX}per_layer_projection_norm.weight"]
        per_layer = self._per_layer_inputs(hidden, token_part, projection, norm, self.dtype)
        last: dict[bool, KeyValue] = {}
        for layer in range(shape.layers):
            full, owns = shape.is_full(layer), shape.owns_keys(layer)
            prefix = f"{TEXT_PREFIX}layers.{layer}."
            names = _SANDWICH_NAMES[:2] + _SHARING_NAMES + (_OWN_NAMES if owns else ())
            block = self._block(prefix, names)
            shared = None if owns else last[full]
            hidden, last[full] = self._attention(
                hidden, *self._text_rope[full], self._masks[full], shared, block, self.dtype
            )
            block = self._block(prefix, _SANDWICH_NAMES[2:] + _TAIL_NAMES)
            hidden = self._layer_tail(hidden, per_layer[:, :, layer], block, self.dtype)
        return rms_norm(hidden, self.weights[f"{TEXT_PREFIX}norm.weight"])

    def logits(self, hidden: Tensor) -> Tensor:
        softcap = self.shape.softcap
        return torch.tanh(super().logits(hidden) / softcap) * softcap

    def _look_up_both(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the token table and of the per-layer table, in one product."""
        tables = (
            self.weights[f"{TEXT_PREFIX}embed_tokens.weight"],
            self.weights[f"{TEXT_PREFIX}embed_tokens_per_layer.weight"],
        )
        widths = [table.shape[1] for table in tables]
        hidden, token_part = self._look_up(ids, torch.cat(tables, 1)).split(widths, -1)
        return hidden, token_part
