"""An MTP head in PyTorch, fp32, made of transformers' own layer; saved beside a target's weights.

It has no cache: every step runs the whole sequence.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from tests import tiny


class Head(nn.Module):
    """Parameter names are the checkpoint's, without `mtp.`."""

    def __init__(self, text: Any):
        super().__init__()
        width, eps = text.hidden_size, text.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps=eps)
        index = text.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(text, index)])
        self.norm = Qwen3_5RMSNorm(width, eps=eps)
        self.rotary = Qwen3_5TextRotaryEmbedding(text)

    def forward(self, rows: Any, hidden: Any, positions: Any) -> Any:
        """Hidden states `[1, T, D]`; `rows` come one token later than `hidden` and `positions`."""
        halves = [self.pre_fc_norm_embedding(rows), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(halves, dim=-1))
        angles = self.rotary(x, positions)
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        return self.norm(self.layers[0](x, angles, attention_mask=mask))


def add_head(folder: Path, text: Any, seed: int = 5) -> Head:
    """Make a random head for the text config of the checkpoint in `folder` and save it there."""
    text._attn_implementation = "eager"
    head = Head(text).eval()
    tiny.randomise(head, seed)
    tensors = {f"mtp.{name}": value for name, value in head.state_dict().items()}
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)
    return head


def chain_logits(
    head: Head, table: np.ndarray, output: np.ndarray, ids: Any, hidden: Any, rows: Any,
    positions: Any, later: Any, steps: int,
) -> tuple[np.ndarray, list[int]]:  # fmt: skip
    """Logits `[steps, V]` and ids of one row's greedy chain.

    `hidden`, `positions` `[3, P]` and `rows` are those of P tokens before the anchor `ids`; the
    rotary position of the anchor is `later`.
    """
    rows = torch.from_numpy(np.concatenate([rows[1:], table[[ids]]]))[None]
    hidden = torch.from_numpy(hidden)[None]
    positions = torch.from_numpy(positions).long()[:, None]
    made, chosen = [], []
    with torch.no_grad():
        for step in range(steps):
            out = head(rows, hidden, positions)[:, -1:]
            made.append(out[0, 0].numpy() @ output.T)
            chosen.append(int(made[-1].argmax()))
            rows = torch.cat([rows, torch.from_numpy(table[chosen[-1:]])[None]], 1)
            hidden = torch.cat([hidden, out], 1)
            positions = torch.cat([positions, torch.full((3, 1, 1), later + step)], 2)
    return np.stack(made), chosen
