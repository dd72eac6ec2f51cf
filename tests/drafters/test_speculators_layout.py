"""Drafts in the layout of the speculators library, written and read."""

import json
from pathlib import Path

import pytest

from mmflash_jax.drafters.dflash_config import Config
from mmflash_jax.drafters.speculators_layout import from_speculators, to_speculators
from mmflash_jax.load import load_any_drafter
from mmflash_jax.registry import PAIRS
from mmflash_jax.training import export
from mmflash_jax.weights import TensorStore
from mmflash_jax.weights.hf_config import ConfigError
from tests.drafters.test_dflash_config import OWN, read

VERIFIER = ("Qwen/Qwen3.5-4B", ["Qwen3_5ForConditionalGeneration"])
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 12,
    "use_sliding_window": True,
}
SHAPES = {
    "full": {},
    "sliding": SLIDING,
    "sliding, both ways": {**SLIDING, "is_causal": False},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_both_layouts_say_the_same(changes):
    wanted = read(**changes)
    made = to_speculators(wanted.to_hf(), *VERIFIER)
    assert Config.from_hf(json.loads(json.dumps(made))) == wanted


def test_layer_ids_count_the_embedding():
    wanted = read()
    made = to_speculators(wanted.to_hf(), *VERIFIER)
    assert made["aux_hidden_state_layer_ids"] == [i + 1 for i in wanted.target_layer_ids]
    assert made["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == (
        wanted.block_size - 1
    )
    assert made["speculators_config"]["verifier"]["name_or_path"] == VERIFIER[0]


def test_a_file_that_does_not_count_the_targets_layers_is_read():
    made = to_speculators(read().to_hf(), *VERIFIER)
    del made["transformer_layer_config"]["num_target_layers"]
    assert Config.from_hf(made).num_target_layers is None


@pytest.mark.parametrize(
    ("own", "changes", "words"),
    [
        ({"input_embedding_scale": 50.5}, {}, ["input_embedding_scale is 50.5", "zlab"]),
        ({"final_logit_softcapping": 30.0}, {}, ["final_logit_softcapping is 30.0"]),
        ({"output_multiplier": 2.0}, {}, ["output_multiplier is 2.0"]),
        ({}, {"is_causal": True}, ["is_causal is true"]),
    ],
)
def test_what_the_layout_cannot_say_is_refused(own, changes, words):
    config = read({**OWN, **own}, **changes)
    with pytest.raises(ConfigError) as error:
        to_speculators(config.to_hf(), *VERIFIER)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_vocab_size": 32}, ["draft_vocab_size is 32"]),
        ({"sample_from_anchor": True}, ["sample_from_anchor is True"]),
        ({"speculators_model_type": "eagle3"}, ["speculators_model_type is 'eagle3'"]),
        ({"aux_hidden_state_layer_ids": None}, ["aux_hidden_state_layer_ids"]),
    ],
)
def test_what_is_not_implemented_is_refused(changes, words):
    made = to_speculators(read().to_hf(), *VERIFIER) | changes
    with pytest.raises(ConfigError) as error:
        from_speculators(made)
    assert all(word in str(error.value) for word in words)


def test_a_shipped_draft_goes_there_and_back(tmp_path, monkeypatch):
    name = "demo"
    source = PAIRS[name].draft

    def run(*arguments) -> int:
        monkeypatch.setattr("sys.argv", ["export", *map(str, arguments)])
        return export.main()

    there, back = tmp_path / "there", tmp_path / "back"
    assert run(source, there, "--layout", "speculators", "--target", name) == 0
    config = json.loads((there / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": PAIRS[name].target,
        "architectures": ["Qwen3_5ForConditionalGeneration"],
    }
    assert run(there, back) == 0
    wanted, _ = load_any_drafter(Path(source), "bfloat16")
    drafter, _ = load_any_drafter(back, "bfloat16")
    assert drafter.config == wanted.config
    first, last = TensorStore(source), TensorStore(back)
    assert set(first) == set(last)
    assert all(first[name].tobytes() == last[name].tobytes() for name in first)


def test_the_layout_needs_the_targets_name(tmp_path, monkeypatch, capsys):
    arguments = ["export", PAIRS["demo"].draft, str(tmp_path / "x"), "--layout", "speculators"]
    monkeypatch.setattr("sys.argv", arguments)
    assert export.main() == 2
    assert "give it with --target" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_the_library_reads_the_config(tmp_path):
    """Where the speculators package is installed; it asks for older transformers than ours."""
    speculators = pytest.importorskip("speculators")
    wanted = read(**SLIDING)
    made = to_speculators(wanted.to_hf(), *VERIFIER)
    (tmp_path / "config.json").write_text(json.dumps(made))
    theirs = speculators.SpeculatorModelConfig.from_pretrained(str(tmp_path))
    assert type(theirs) is speculators.DFlashSpeculatorConfig
    assert theirs.aux_hidden_state_layer_ids == made["aux_hidden_state_layer_ids"]
    assert theirs.block_size == wanted.block_size
    assert theirs.draft_vocab_size == wanted.vocab_size
    assert theirs.mask_token_id == wanted.mask_token_id
    layer = theirs.transformer_layer_config
    assert layer.head_dim == wanted.head_dim
    assert layer.layer_types == SLIDING["layer_types"]
    assert layer.rope_parameters["rope_theta"] == wanted.rope_theta
    # What the library writes is read here as the same draft.
    theirs.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert Config.from_hf(again) == wanted
