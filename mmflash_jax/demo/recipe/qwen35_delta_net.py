"""The gated delta net of Qwen3.5's linear layers, in chunks and with matrix products only."""

import torch
from torch import Tensor
from torch.nn import functional

from mmflash_jax.demo.recipe.network import EPSILON, inverse_rms, project
from mmflash_jax.demo.recipe.qwen35_shape import Qwen35Shape

CHUNK = 32  # tokens per chunk; sequences are a multiple of it

DELTA_NET_NAMES = tuple(
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


def _unit_length(inputs: Tensor) -> Tensor:
    return inputs * torch.rsqrt(inputs.pow(2).sum(-1, keepdim=True) + EPSILON)


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


def delta_net(
    normed: Tensor, weights: dict[str, Tensor], shape: Qwen35Shape, dtype: torch.dtype
) -> Tensor:
    """What the mixer adds to the residual stream."""
    batch, length, _ = normed.shape
    head_width, value_heads = shape.linear_head_width, shape.linear_value_heads
    mixer = {name.removeprefix("linear_attn."): weights[name] for name in DELTA_NET_NAMES}
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
    out = out * inverse_rms(out) * mixer["norm.weight"] * gate
    out = out.reshape(batch, length, -1).to(dtype)
    return project(out, mixer["out_proj.weight"]).float()
