"""Rules of projections that checkpoints keep apart and layers keep in one kernel."""

from mmflash_jax.layers.schema import Path
from mmflash_jax.weights.rules import TRANSPOSE, Rule, side_by_side


def mlp_projections(prefix: str, path: Path, hidden: int) -> list[Rule]:
    """`gate_proj`, `up_proj` and `down_proj` of a `layers.mlp.GatedMLP`."""
    joined = {f"{prefix}{name}_proj.weight": hidden for name in ("gate", "up")}
    return [
        *side_by_side(joined, (*path, "gate_up_proj", "kernel")),
        Rule(f"{prefix}down_proj.weight", (*path, "down_proj", "kernel"), TRANSPOSE),
    ]


def attention_projections(prefix: str, path: Path, queries: int, keys: int) -> list[Rule]:
    """`q_proj`, `k_proj`, `v_proj` and `o_proj` of an attention layer.

    queries: width of `q_proj`, a gate that it brings included.
    keys: width of `k_proj` and of `v_proj`, 0 where a layer makes no keys.
    """
    widths = {"q": queries, "k": keys, "v": keys}
    joined = {f"{prefix}{name}_proj.weight": width for name, width in widths.items() if width}
    return [
        *side_by_side(joined, (*path, "qkv_proj", "kernel")),
        Rule(f"{prefix}o_proj.weight", (*path, "o_proj", "kernel"), TRANSPOSE),
    ]
