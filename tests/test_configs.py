"""The shipped configs are valid, and their drafts are those of the published models."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import shapes
from mmflash_jax.config_drafts import DraftShape
from mmflash_jax.config_files import find_config, read_yaml
from mmflash_jax.config_train import TrainConfig
from mmflash_jax.registry import PAIRS
from mmflash_jax.weights.hf_config import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"

PUBLISHED = {
    "qwen35_4b.yaml": ("qwen35-4b", shapes.QWEN35_DRAFT),
    "gemma4_e4b.yaml": ("gemma4-e4b", shapes.GEMMA4_DRAFT),
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_is_valid(path):
    """By its bare name, from anywhere."""
    config = read_yaml(find_config(path.name), TrainConfig)
    assert config.output.name == path.stem


@pytest.mark.parametrize(
    "masks", [{}, {"mask_token": "x", "mask_token_id": 3}], ids=["neither", "both"]
)
def test_a_mask_is_named_once(masks):
    fields: dict[str, Any] = {
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "num_attention_heads": 1,
    }
    with pytest.raises(ConfigError, match=r"mask_token .* give one"):
        DraftShape(**fields, num_key_value_heads=1, head_dim=8, **masks)


@pytest.mark.parametrize("name", PUBLISHED)
def test_drafts_have_the_published_geometry(name):
    pair, published = PUBLISHED[name]
    config = read_yaml(find_config(name), TrainConfig)
    assert config.target == PAIRS[pair].target
    assert isinstance(config.draft, DraftShape)
    for field in (
        "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "block_size",
    ):  # fmt: skip
        assert getattr(config.draft, field) == published[field], field
    own = published["dflash_config"]
    assert list(config.draft.target_layer_ids or ()) == own["target_layer_ids"]
    assert config.draft.rope_theta == published["rope_parameters"]["rope_theta"]
    assert config.draft.input_embedding_scale == own.get("input_embedding_scale", 1.0)
    assert config.draft.final_logit_softcapping == own.get("final_logit_softcapping")
    assert config.objective.anchors == 512
