"""An EAGLE-3 draft in PyTorch, fp32, written from its description; saved in either layout.

It has no cache: every step runs the whole sequence. Tensors carry EAGLE's own names.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional

KNOWN = 200
"""Tokens that a draft with a reduced vocabulary knows."""


def layer_config(text: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Fields of the draft's layer for a target with that text config."""
    return {
        "model_type": "llama",
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "attention_bias": False,
        "mlp_bias": False,
        **changes,
    }


def eagle_config(layer: Mapping[str, Any], layers: Sequence[int], **own: Any) -> dict[str, Any]:
    """EAGLE's layout; `layers` are outputs of the target's layers."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": KNOWN, **layer}
    ids = [layer + 1 for layer in layers]
    return {**config, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}, **own}


def speculators_config(
    layer: Mapping[str, Any], layers: Sequence[int], **own: Any
) -> dict[str, Any]:
    """The layout of speculators; `layers` are outputs of the target's layers."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]},
        "transformer_layer_config": dict(layer),
        "draft_vocab_size": KNOWN,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "embed_requires_grad": False,
        **own,
    }


def _norm(weight: torch.Tensor, x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Head:
    """Random tensors for a config of either layout, and what they compute."""

    def __init__(self, config: Mapping[str, Any], *, captured: int = 3, seed: int = 5):
        self.layer = config.get("transformer_layer_config", config)
        self.own = config
        self.is_speculators = "transformer_layer_config" in config
        layer, width = self.layer, self.layer["hidden_size"]
        heads, kv, dim = (
            layer[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        random = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            noise = random.standard_normal((rows, columns), np.float32) / math.sqrt(columns)
            return torch.from_numpy(noise)

        def vector(size: int, about: float = 1.0) -> torch.Tensor:
            return torch.from_numpy(about + 0.2 * random.standard_normal(size, np.float32))

        made = {
            "fc.weight": matrix(width, captured * width),
            "norm.weight": vector(width),
            # Widely spread, or every token would be about as likely as any.
            "lm_head.weight": 3 * matrix(config["draft_vocab_size"], width),
            "midlayer.mlp.gate_proj.weight": matrix(layer["intermediate_size"], width),
            "midlayer.mlp.up_proj.weight": matrix(layer["intermediate_size"], width),
            "midlayer.mlp.down_proj.weight": matrix(width, layer["intermediate_size"]),
        }
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            made[f"midlayer.{name}.weight"] = vector(width)
        for name, count in {"q": heads, "k": kv, "v": kv}.items():
            made[f"midlayer.self_attn.{name}_proj.weight"] = matrix(count * dim, 2 * width)
        made["midlayer.self_attn.o_proj.weight"] = matrix(width, heads * dim)
        if layer["attention_bias"]:
            for name, size in {"q": heads * dim, "k": kv * dim, "v": kv * dim, "o": width}.items():
                made[f"midlayer.self_attn.{name}_proj.bias"] = vector(size, 0.0)
        if layer["model_type"] == "qwen3":
            for name in "qk":
                made[f"midlayer.self_attn.{name}_norm.weight"] = vector(dim)
        if config.get("norm_before_fc"):
            made["input_norm.weight"] = vector(captured * width)
        if config.get("fc_norm"):
            made |= {f"fc_norm.{i}.weight": vector(width) for i in range(captured)}
        if config["draft_vocab_size"] < layer["vocab_size"]:
            known = np.sort(random.permutation(layer["vocab_size"])[: config["draft_vocab_size"]])
            made["d2t"] = torch.from_numpy(known - np.arange(len(known)))
            made["t2d"] = torch.isin(torch.arange(layer["vocab_size"]), torch.from_numpy(known))
        self.tensors = made

    def save(self, folder: Path, **more: torch.Tensor) -> Path:
        """Write the checkpoint; `more` are tensors beside its own."""
        prefix = "layers.0." if self.is_speculators else "midlayer."
        names = {name: name.replace("midlayer.", prefix) for name in self.tensors}
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {names[name]: value.contiguous() for name, value in self.tensors.items()}
        save_file({**tensors, **more}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(dict(self.own)))
        return folder

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        t, eps = self.tensors, self.layer["rms_norm_eps"]
        if self.own.get("norm_before_fc"):
            features = _norm(t["input_norm.weight"], features, eps)
        if self.own.get("fc_norm"):
            parts = features.chunk(features.shape[-1] // self.layer["hidden_size"], -1)
            normed = [_norm(t[f"fc_norm.{i}.weight"], x, eps) for i, x in enumerate(parts)]
            features = torch.cat(normed, -1)
        return features @ t["fc.weight"].T

    def _heads(self, x: torch.Tensor, name: str, turned: bool = True) -> torch.Tensor:
        t, dim = self.tensors, self.layer["head_dim"]
        at = f"midlayer.self_attn.{name}"
        x = functional.linear(x, t[f"{at}_proj.weight"], t.get(f"{at}_proj.bias"))
        x = x.reshape(len(x), -1, dim).transpose(0, 1)
        if f"{at}_norm.weight" in t:
            x = _norm(t[f"{at}_norm.weight"], x, self.layer["rms_norm_eps"])
        if not turned:
            return x
        half = dim // 2
        frequency = self.layer["rope_theta"] ** (-torch.arange(half) / half)
        # Pair i stands for token i + 1; as scores depend on differences alone, count from 0.
        angle = torch.arange(x.shape[1])[:, None] * frequency
        cosine, sine = angle.cos(), angle.sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)

    def run(self, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs `[T, D]` of pairs in the order of their tokens."""
        t, eps = self.tensors, self.layer["rms_norm_eps"]
        normed = _norm(t["midlayer.hidden_norm.weight"], hidden, eps)
        residual = normed if self.own.get("norm_before_residual") else hidden
        x = torch.cat([_norm(t["midlayer.input_layernorm.weight"], rows, eps), normed], -1)
        q, k, v = self._heads(x, "q"), self._heads(x, "k"), self._heads(x, "v", turned=False)
        group = len(q) // len(k)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        place = torch.arange(len(x))
        far = self.layer.get("sliding_window") or len(x)
        distance = place[:, None] - place
        score = q @ k.transpose(1, 2) * self.layer["head_dim"] ** -0.5
        score = score.masked_fill((distance < 0) | (distance >= far), -torch.inf)
        mixed = (score.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
        at = "midlayer.self_attn.o_proj"
        x = residual + functional.linear(mixed, t[f"{at}.weight"], t.get(f"{at}.bias"))
        y = _norm(t["midlayer.post_attention_layernorm.weight"], x, eps)
        gate = functional.silu(y @ t["midlayer.mlp.gate_proj.weight"].T)
        y = gate * (y @ t["midlayer.mlp.up_proj.weight"].T)
        return x + y @ t["midlayer.mlp.down_proj.weight"].T

    def logits(
        self, features: np.ndarray, rows: np.ndarray, table: np.ndarray, known: Sequence[int]
    ) -> np.ndarray:
        """Logits over the target's vocabulary after the last of `known`: the anchor and drafts.

        `features` `[P, captured * D]` and `rows` `[P, D]` are of the tokens before the anchor.
        """
        fused = self.fuse(torch.from_numpy(features))
        rows = np.concatenate([rows[1:], table[known[:1]]])
        x, hidden = torch.from_numpy(rows), fused
        weight, eps = self.tensors["norm.weight"], self.layer["rms_norm_eps"]
        last = self.run(x, hidden)[-1:]
        for id in known[1:]:
            fed = _norm(weight, last, eps) if self.own.get("norm_output") else last
            x = torch.cat([x, torch.from_numpy(table[[id]])])
            hidden = torch.cat([hidden, fed])
            last = self.run(x, hidden)[-1:]
        drafted = (_norm(weight, last, eps) @ self.tensors["lm_head.weight"].T)[0].numpy()
        if "d2t" not in self.tensors:
            return drafted
        out = np.full(self.layer["vocab_size"], -np.inf, np.float32)
        out[np.arange(len(drafted)) + self.tensors["d2t"].numpy()] = drafted
        return out
