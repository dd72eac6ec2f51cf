"""An exported draft as a server's own parser reads it, where that server is installed."""

import json

import pytest

from mmflash_jax.drafters.dflash_config import Config
from mmflash_jax.registry import PAIRS
from mmflash_jax.weights.hf_config import read_json


@pytest.mark.parametrize("name", ["demo", "demo-gemma4"])
def test_sglang_parses_the_export(name, tmp_path):
    """D13. Needs no GPU, but all that `sglang` imports: its parser sits among its kernels."""
    utils = pytest.importorskip("sglang.srt.speculative.dflash_utils")
    from transformers import AutoConfig

    config = Config.from_hf(read_json(f"{PAIRS[name].draft}/config.json"))
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    parsed = utils.parse_dflash_draft_config(
        draft_hf_config=AutoConfig.from_pretrained(str(tmp_path))
    )
    assert parsed.target_layer_ids == list(config.target_layer_ids)
    assert parsed.mask_token_id == config.mask_token_id
    assert parsed.block_size == config.block_size
    assert parsed.num_target_layers == config.num_target_layers
    assert parsed.final_logit_softcapping == config.final_logit_softcapping
    assert parsed.output_multiplier == config.output_multiplier
