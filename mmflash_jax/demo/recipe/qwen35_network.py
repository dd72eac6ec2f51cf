"""The training forward of Qwen3.5 for one picture size."""

import torch
from torch import Tensor
from torch.nn import functional

from mmflash_jax.demo.recipe.network import (
    EPSILON,
    TEXT_PREFIX,
    TargetNetwork,
    cosine_sine,
    inverse_rms,
    project,
    rotate_half,
)
from mmflash_jax.demo.recipe.qwen35_delta_net import DELTA_NET_NAMES, delta_net
from mmflash_jax.demo.recipe.qwen35_geometry import text_angles, to_patches, vision_positions
from mmflash_jax.demo.recipe.qwen35_shape import VISION_PREFIX, Qwen35Shape

_FULL_NAMES = tuple(
    f"self_attn.{name}.weight"
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
)
_NORM_NAMES = ("input_layernorm.weight", "post_attention_layernorm.weight")
_MLP_NAMES = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
_VISION_NAMES = tuple(
    f"{module}.{part}"
    for module in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
    for part in ("weight", "bias")
)
_MERGER_NAMES = tuple(
    f"{module}.{part}"
    for module in ("norm", "linear_fc1", "linear_fc2")
    for part in ("weight", "bias")
)


def centred_rms_norm(inputs: Tensor, weight: Tensor) -> Tensor:
    inputs = inputs.float()
    return inputs * inverse_rms(inputs) * (1 + weight)


def _with_mlp(hidden: Tensor, weights: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The half of a decoder layer that both kinds share."""
    normed = centred_rms_norm(hidden, weights["post_attention_layernorm.weight"]).to(dtype)
    gate, up, down = (weights[name] for name in _MLP_NAMES)
    gated = functional.silu(project(normed, gate)) * project(normed, up)
    return hidden + project(gated, down).float()


def linear_layer(
    hidden: Tensor, weights: dict[str, Tensor], shape: Qwen35Shape, dtype: torch.dtype
) -> Tensor:
    """A decoder layer with gated delta-net mixing."""
    normed = centred_rms_norm(hidden, weights["input_layernorm.weight"]).to(dtype)
    return _with_mlp(hidden + delta_net(normed, weights, shape, dtype), weights, dtype)


def full_layer(
    hidden: Tensor,
    cosine: Tensor,
    sine: Tensor,
    weights: dict[str, Tensor],
    shape: Qwen35Shape,
    dtype: torch.dtype,
) -> Tensor:
    """A decoder layer with gated causal attention."""
    batch, length, _ = hidden.shape
    head_width, rotary = shape.head_width, shape.rotary_width
    normed = centred_rms_norm(hidden, weights["input_layernorm.weight"]).to(dtype)
    query_and_gate = project(normed, weights["self_attn.q_proj.weight"])
    # Query and output gate sit side by side inside each head.
    query, gate = query_and_gate.view(batch, length, shape.heads, 2 * head_width).chunk(2, -1)
    key = project(normed, weights["self_attn.k_proj.weight"])
    value = project(normed, weights["self_attn.v_proj.weight"])
    key = key.view(batch, length, shape.kv_heads, head_width)
    value = value.view(batch, length, shape.kv_heads, head_width).transpose(1, 2)

    def rotated(tensor: Tensor, norm: Tensor) -> Tensor:
        tensor = centred_rms_norm(tensor, norm).transpose(1, 2)
        turned, passed = tensor[..., :rotary], tensor[..., rotary:]
        turned = turned * cosine + rotate_half(turned) * sine
        return torch.cat((turned, passed), -1).to(dtype)

    query = rotated(query, weights["self_attn.q_norm.weight"])
    key = rotated(key, weights["self_attn.k_norm.weight"])
    groups = shape.heads // shape.kv_heads
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    out = out.transpose(1, 2).reshape(batch, length, -1)
    out = out * torch.sigmoid(gate.reshape(batch, length, -1))
    hidden = hidden + project(out, weights["self_attn.o_proj.weight"]).float()
    return _with_mlp(hidden, weights, dtype)


def vision_layer(
    hidden: Tensor,
    cosine: Tensor,
    sine: Tensor,
    weights: dict[str, Tensor],
    shape: Qwen35Shape,
    dtype: torch.dtype,
) -> Tensor:
    """A block of the image tower: attention over all patches of the picture."""
    batch, patches, width = hidden.shape

    def normed(name: str) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return functional.layer_norm(hidden, (width,), weight, bias, EPSILON).to(dtype)

    def linear(inputs: Tensor, name: str) -> Tensor:
        return project(inputs, weights[f"{name}.weight"], weights[f"{name}.bias"])

    joint = linear(normed("norm1"), "attn.qkv").view(batch, patches, 3, shape.vision_heads, -1)
    query, key, value = joint.permute(2, 0, 3, 1, 4)
    query, key = (
        (part.float() * cosine + rotate_half(part.float()) * sine).to(dtype)
        for part in (query, key)
    )
    out = functional.scaled_dot_product_attention(query, key, value)
    out = out.transpose(1, 2).reshape(batch, patches, width)
    hidden = hidden + linear(out, "attn.proj").float()
    inner = functional.gelu(linear(normed("norm2"), "mlp.linear_fc1"), approximate="tanh")
    return hidden + linear(inner, "mlp.linear_fc2").float()


class Qwen35Network(TargetNetwork[Qwen35Shape]):
    """Delta-net and attention layers over text and merged image tokens."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        shape: Qwen35Shape,
        prefix_length: int,
        length: int,
        device: str,
        dtype: torch.dtype,
        compiled: bool,
    ) -> None:
        super().__init__(weights, shape, prefix_length, length, device, dtype, compiled)
        self._linear_layer = self._wrap(linear_layer)
        self._full_layer = self._wrap(full_layer)
        self._vision_layer = self._wrap(vision_layer)
        interpolation, patch_angles = vision_positions(shape)
        self._vision_positions = interpolation.to(device)
        self._vision_rope = tuple(part.to(device) for part in cosine_sine(patch_angles))
        token_angles = text_angles(shape, prefix_length, length)
        self._text_rope = tuple(part.to(device) for part in cosine_sine(token_angles))

    def vision(self, images: Tensor) -> Tensor:
        shape, batch = self.shape, images.shape[0]
        patches = to_patches(images, shape).to(self.dtype)
        weight = self.weights[f"{VISION_PREFIX}patch_embed.proj.weight"]
        # A still picture is its frame repeated, so the temporal slices add up.
        weight = weight.sum(2).reshape(shape.vision_width, -1)
        hidden = project(patches, weight, self.weights[f"{VISION_PREFIX}patch_embed.proj.bias"])
        position_table = self.weights[f"{VISION_PREFIX}pos_embed.weight"]
        hidden = hidden.float() + self._vision_positions @ position_table
        for layer in range(shape.vision_layers):
            block = self._block(f"{VISION_PREFIX}blocks.{layer}.", _VISION_NAMES)
            hidden = self._vision_layer(hidden, *self._vision_rope, block, shape, self.dtype)
        merger = self._block(f"{VISION_PREFIX}merger.", _MERGER_NAMES)
        hidden = functional.layer_norm(
            hidden, (shape.vision_width,), merger["norm.weight"], merger["norm.bias"], EPSILON
        )
        hidden = hidden.to(self.dtype).reshape(batch, shape.image_tokens, -1)
        hidden = project(hidden, merger["linear_fc1.weight"], merger["linear_fc1.bias"])
        hidden = functional.gelu(hidden)
        return project(hidden, merger["linear_fc2.weight"], merger["linear_fc2.bias"]).float()

    def text(self, ids: Tensor, features: Tensor) -> Tensor:
        table = self.weights[f"{TEXT_PREFIX}embed_tokens.weight"]
        hidden = self._with_image(self._look_up(ids, table), features)
        for layer in range(self.shape.layers):
            prefix = f"{TEXT_PREFIX}layers.{layer}."
            if self.shape.is_linear(layer):
                block = self._block(prefix, _NORM_NAMES + DELTA_NET_NAMES + _MLP_NAMES)
                hidden = self._linear_layer(hidden, block, self.shape, self.dtype)
            else:
                block = self._block(prefix, _NORM_NAMES + _FULL_NAMES + _MLP_NAMES)
                rope = self._text_rope
                hidden = self._full_layer(hidden, *rope, block, self.shape, self.dtype)
        return centred_rms_norm(hidden, self.weights[f"{TEXT_PREFIX}norm.weight"])
