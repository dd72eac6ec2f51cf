"""A static-shape training forward of Qwen3.5 for one picture size, capturable in a CUDA graph.

transformers' own class splits vision attention per picture and builds rope positions in Python for
every row, which leaves a GPU idle at this size. Here every prompt starts the same way, is padded on
the right and holds one picture, so positions are constant and no mask is needed. Parameter names
are transformers' own; `tests/demo` checks the logits.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from mmflash_jax.demo.recipe.geometry import (
    cosine_sine,
    text_angles,
    to_patches,
    vision_positions,
)
from mmflash_jax.demo.recipe.shape import TEXT_PREFIX, VISION_PREFIX, TargetShape

EPSILON = 1e-6
CHUNK = 32  # tokens per delta-net chunk; sequences are a multiple of it

_LINEAR_NAMES = tuple(
    f"linear_attn.{name}"
    for name in (
        "conv1d.weight",
        "in_proj_qkv.weight",
        "in_proj_z.weight",
        "in_proj_b.weight",
        "in_proj_a.weight",
        "out_proj.weight",
        "norm.weight",
        "dt_bias",
        "A_log",
    )
)
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


def project(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map in the dtype of its input; master weights stay float32."""
    bias = None if bias is None else bias.to(inputs.dtype)
    return functional.linear(inputs, weight.to(inputs.dtype), bias)


def centred_rms_norm(inputs: Tensor, weight: Tensor) -> Tensor:
    inputs = inputs.float()
    return inputs * _inverse_rms(inputs) * (1 + weight)


def _inverse_rms(inputs: Tensor) -> Tensor:
    return torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + EPSILON)


def _unit_length(inputs: Tensor) -> Tensor:
    return inputs * torch.rsqrt(inputs.pow(2).sum(-1, keepdim=True) + EPSILON)


def _rotate_half(inputs: Tensor) -> Tensor:
    first, second = inputs.chunk(2, -1)
    return torch.cat((-second, first), -1)


def unit_lower_inverse(strictly_lower: Tensor) -> Tensor:
    """Inverse of (identity + strictly lower), with matrix products only.

    Blocks are doubled without a gradient; the Newton step at the end leaves the value as it is and
    carries the exact gradient. A triangular solve would break the CUDA graph.
    """
    size = strictly_lower.shape[-1]
    identity = torch.eye(size, device=strictly_lower.device, dtype=strictly_lower.dtype)
    index = torch.arange(size, device=strictly_lower.device)
    values = strictly_lower.detach()
    inverse = identity.expand_as(strictly_lower)
    block = 1
    while block < size:
        odd_row = (index[:, None] // block) % 2 == 1
        below_diagonal = index[None] // block == index[:, None] // block - 1
        inverse = inverse - inverse @ (values * (odd_row & below_diagonal)) @ inverse
        block *= 2
    return 2 * inverse - inverse @ ((identity + strictly_lower) @ inverse)


def _gated_mlp(
    hidden: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype
) -> Tensor:
    normed = centred_rms_norm(hidden, norm).to(dtype)
    gated = functional.silu(project(normed, gate)) * project(normed, up)
    return hidden + project(gated, down).float()


def _causal_conv(inputs: Tensor, weight: Tensor) -> Tensor:
    """Depthwise, four taps, the last of which is the current token; then silu."""
    length, taps = inputs.shape[1], weight.shape[-1]
    padded = functional.pad(inputs, (0, 0, taps - 1, 0))
    shifted = (padded[:, tap : tap + length] * weight[:, 0, tap] for tap in range(taps))
    return functional.silu(sum(shifted))


def _chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
) -> Tensor:
    """The gated delta rule; every argument is [batch, heads, chunks, CHUNK, width or 1]."""
    index = torch.arange(CHUNK, device=query.device)
    cumulative = decay[..., 0].cumsum(-1)
    from_to = cumulative[..., None] - cumulative[..., None, :]
    from_to = from_to.masked_fill(index[:, None] < index[None], float("-inf")).exp()
    scaled_key = key * beta
    lower = (scaled_key @ key.transpose(-1, -2)) * from_to * (index[:, None] > index[None])
    inverse = unit_lower_inverse(lower)
    since_start = cumulative.exp()[..., None]
    own_update = inverse @ (value * beta)
    state_key = inverse @ (scaled_key * since_start)
    scores = (query @ key.transpose(-1, -2)) * from_to
    state_query = query * since_start
    key_to_end = key * (cumulative[..., -1:] - cumulative).exp()[..., None]
    whole_chunk = cumulative[..., -1].exp()[..., None, None]
    batch, heads, chunks, _, width = query.shape
    state = torch.zeros(batch, heads, width, value.shape[-1], device=query.device)
    outputs = []
    for chunk in range(chunks):
        update = own_update[:, :, chunk] - state_key[:, :, chunk] @ state
        outputs.append(state_query[:, :, chunk] @ state + scores[:, :, chunk] @ update)
        state = state * whole_chunk[:, :, chunk]
        state = state + key_to_end[:, :, chunk].transpose(-1, -2) @ update
    return torch.stack(outputs, 2)


def linear_layer(
    hidden: Tensor, weights: dict[str, Tensor], shape: TargetShape, dtype: torch.dtype
) -> Tensor:
    """A decoder layer with gated delta-net mixing."""
    batch, length, _ = hidden.shape
    head_width, value_heads = shape.linear_head_width, shape.linear_value_heads
    mixer = {name.removeprefix("linear_attn."): weights[name] for name in _LINEAR_NAMES}
    normed = centred_rms_norm(hidden, weights["input_layernorm.weight"]).to(dtype)
    mixed = project(normed, mixer["in_proj_qkv.weight"]).float()
    mixed = _causal_conv(mixed, mixer["conv1d.weight"])
    widths = [shape.linear_key_width, shape.linear_key_width, shape.linear_value_width]
    query, key, value = (
        part.reshape(batch, length, -1, head_width) for part in mixed.split(widths, -1)
    )
    repeats = value_heads // shape.linear_key_heads
    query = (_unit_length(query) * head_width**-0.5).repeat_interleave(repeats, 2)
    key = _unit_length(key).repeat_interleave(repeats, 2)
    beta = project(normed, mixer["in_proj_b.weight"]).float().sigmoid()[..., None]
    step = project(normed, mixer["in_proj_a.weight"]).float() + mixer["dt_bias"]
    step = functional.softplus(step)
    decay = (-mixer["A_log"].exp() * step)[..., None]

    def chunked(tensor: Tensor) -> Tensor:
        by_head = tensor.transpose(1, 2)
        return by_head.reshape(batch, value_heads, length // CHUNK, CHUNK, -1)

    out = _chunked_delta_rule(
        chunked(query), chunked(key), chunked(value), chunked(beta), chunked(decay)
    )
    out = out.reshape(batch, value_heads, length, head_width).transpose(1, 2)
    gate = project(normed, mixer["in_proj_z.weight"]).float()
    gate = functional.silu(gate.view(batch, length, value_heads, head_width))
    out = out * _inverse_rms(out) * mixer["norm.weight"] * gate
    out = out.reshape(batch, length, -1).to(dtype)
    hidden = hidden + project(out, mixer["out_proj.weight"]).float()
    mlp = [weights[name] for name in _MLP_NAMES]
    return _gated_mlp(hidden, weights["post_attention_layernorm.weight"], *mlp, dtype)


def full_layer(
    hidden: Tensor,
    cosine: Tensor,
    sine: Tensor,
    weights: dict[str, Tensor],
    shape: TargetShape,
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
        turned = turned * cosine + _rotate_half(turned) * sine
        return torch.cat((turned, passed), -1).to(dtype)

    query = rotated(query, weights["self_attn.q_norm.weight"])
    key = rotated(key, weights["self_attn.k_norm.weight"])
    groups = shape.heads // shape.kv_heads
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    out = out.transpose(1, 2).reshape(batch, length, -1)
    out = out * torch.sigmoid(gate.reshape(batch, length, -1))
    hidden = hidden + project(out, weights["self_attn.o_proj.weight"]).float()
    mlp = [weights[name] for name in _MLP_NAMES]
    return _gated_mlp(hidden, weights["post_attention_layernorm.weight"], *mlp, dtype)


def vision_layer(
    hidden: Tensor,
    cosine: Tensor,
    sine: Tensor,
    weights: dict[str, Tensor],
    shape: TargetShape,
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
        (part.float() * cosine + _rotate_half(part.float()) * sine).to(dtype)
        for part in (query, key)
    )
    out = functional.scaled_dot_product_attention(query, key, value)
    out = out.transpose(1, 2).reshape(batch, patches, width)
    hidden = hidden + linear(out, "attn.proj").float()
    inner = functional.gelu(linear(normed("norm2"), "mlp.linear_fc1"), approximate="tanh")
    return hidden + linear(inner, "mlp.linear_fc2").float()


class TargetNetwork:
    """The whole model over float32 master weights; `dtype` is that of the matrix products."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        shape: TargetShape,
        prefix_length: int,
        length: int,
        device: str,
        dtype: torch.dtype,
        compiled: bool,
    ) -> None:
        self.shape, self.prefix_length, self.length = shape, prefix_length, length
        self.device, self.dtype = device, dtype
        self.weights = {name: value.to(device).requires_grad_() for name, value in weights.items()}
        wrap: Callable = torch.compile if compiled else (lambda function: function)
        self._linear_layer = wrap(linear_layer)
        self._full_layer = wrap(full_layer)
        self._vision_layer = wrap(vision_layer)
        interpolation, patch_angles = vision_positions(shape)
        self._vision_positions = interpolation.to(device)
        self._vision_rope = tuple(part.to(device) for part in cosine_sine(patch_angles))
        token_angles = text_angles(shape, prefix_length, length)
        self._text_rope = tuple(part.to(device) for part in cosine_sine(token_angles))

    def _block(self, prefix: str, names: tuple[str, ...]) -> dict[str, Tensor]:
        return {name: self.weights[prefix + name] for name in names}

    def vision(self, images: Tensor) -> Tensor:
        """uint8[batch, height, width, 3] -> image features [batch, image_tokens, width]."""
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
        merger = self._block(
            f"{VISION_PREFIX}merger.",
            _MERGER_NAMES,
        )
        hidden = functional.layer_norm(
            hidden, (shape.vision_width,), merger["norm.weight"], merger["norm.bias"], EPSILON
        )
        hidden = hidden.to(self.dtype).reshape(batch, shape.image_tokens, -1)
        hidden = project(hidden, merger["linear_fc1.weight"], merger["linear_fc1.bias"])
        hidden = functional.gelu(hidden)
        return project(hidden, merger["linear_fc2.weight"], merger["linear_fc2.bias"]).float()

    def text(self, ids: Tensor, features: Tensor) -> Tensor:
        """Hidden states after the last norm; `features` replace the image pads."""
        hidden = self._embed(ids)
        after_image = self.prefix_length + self.shape.image_tokens
        parts = (hidden[:, : self.prefix_length], features, hidden[:, after_image:])
        hidden = torch.cat(parts, 1)
        for layer in range(self.shape.layers):
            prefix = f"{TEXT_PREFIX}layers.{layer}."
            if self.shape.is_linear(layer):
                block = self._block(prefix, _NORM_NAMES + _LINEAR_NAMES + _MLP_NAMES)
                hidden = self._linear_layer(hidden, block, self.shape, self.dtype)
            else:
                block = self._block(prefix, _NORM_NAMES + _FULL_NAMES + _MLP_NAMES)
                rope = self._text_rope
                hidden = self._full_layer(hidden, *rope, block, self.shape, self.dtype)
        return centred_rms_norm(hidden, self.weights[f"{TEXT_PREFIX}norm.weight"])

    def logits(self, hidden: Tensor) -> Tensor:
        table = self.weights[f"{TEXT_PREFIX}embed_tokens.weight"]
        return project(hidden.to(self.dtype), table).float()

    def _embed(self, ids: Tensor) -> Tensor:
        table = self.weights[f"{TEXT_PREFIX}embed_tokens.weight"]
        if self.device == "cpu":
            return functional.embedding(ids, table)
        # A product with one-hot rows: safe in a graph, and its backward is one product too.
        rows = torch.arange(table.shape[0], device=ids.device)
        one_hot = (ids[..., None] == rows).to(self.dtype)
        return functional.linear(one_hot, table.t().to(self.dtype)).float()
