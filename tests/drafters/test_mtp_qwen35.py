"""The MTP head of Qwen3.5 against a head made of transformers' layer, fp32."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from mmflash_jax.drafters import Anchor, Context, FitError, Heads, Qwen35MTP
from mmflash_jax.drafters.base import most_likely
from mmflash_jax.load import load_drafter, load_target
from mmflash_jax.weights import WeightsError, export_params
from mmflash_jax.weights.hf_config import ConfigError
from pallas_kernels import product
from tests import tiny
from tests.drafters import mtp
from tests.drafts import random_draft
from tests.tolerances import MODEL, assert_close

STEPS = 3
# A row of one token, one that ends inside a piece, one whose last token lies in an image.
LENGTHS = np.array([1, 13, 30])
PIECES = [[1, 9, 9], [0, 1, 9], [0, 3, 3], [0, 0, 9]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder with a head, the reference, target, our plan and parameters."""
    folder = tmp_path_factory.mktemp("mtp")
    model = tiny.tiny_qwen35(folder, seed=2, tied=False, text={"num_hidden_layers": 4})
    head = mtp.add_head(folder, model.config.text_config)
    target, target_params = load_target(folder, "float32")
    drafter, params = load_drafter(folder, target, "float32", draft_tokens=STEPS)
    return folder, head, target, target_params, drafter, params


def context_rows(width):
    """Hidden states, table rows (of images too) and positions that jump, of every row."""
    rng = np.random.default_rng(7)
    for length in LENGTHS:
        hidden, rows = rng.normal(size=(2, length, width)).astype(np.float32)
        positions = np.sort(rng.integers(0, 50, (3, length)), axis=1).astype(np.int32)
        yield hidden, rows, positions


def absorb_pieces(drafter, params, data):
    """The state after ragged pieces; what lies behind a piece is junk."""
    state, at = drafter.init_state(len(data), 48), np.zeros(len(data), np.int32)
    absorb = jax.jit(drafter.absorb)
    for counts in PIECES:
        features = np.full((len(data), 9, data[0][0].shape[1]), 1e3, np.float32)
        rows, positions = features.copy(), np.full((3, len(data), 9), 777, np.int32)
        for b, count in enumerate(counts):
            here = slice(at[b], at[b] + count)
            features[b, :count], rows[b, :count] = data[b][0][here], data[b][1][here]
            positions[:, b, :count] = data[b][2][:, here]
        context = Context(
            features=jnp.asarray(features), rows=jnp.asarray(rows),
            positions=jnp.asarray(positions), length=jnp.asarray(at), count=jnp.asarray(counts),
        )  # fmt: skip
        state = absorb(params, state, context)
        at = at + np.array(counts, np.int32)
    np.testing.assert_array_equal(at, LENGTHS)
    return state


def test_chain_logits_match_the_reference(made):
    """Ragged rows and pieces, positions that jump, untied head, norms and gates all random."""
    _, head, target, target_params, drafter, params = made
    table, output = (np.array(target_params[n]["embedding"]) for n in ("embed_tokens", "lm_head"))
    data = list(context_rows(table.shape[1]))
    state = absorb_pieces(drafter, params, data)
    anchors, later = np.array([7, 130, 65]), np.array([4, 60, 31])
    seen: Any = []

    def pick(scored, first=0):
        assert int(first) == len(seen)
        seen.append(np.asarray(scored.make())[:, 0])
        return most_likely(scored)

    heads = Heads(
        embed=lambda ids: target.embed_raw(target_params, ids),
        logits=lambda hidden: product.logits(hidden, target.head(target_params)),
        pick=pick,
    )
    positions = jnp.broadcast_to(jnp.asarray(later), (3, 3))
    anchor = Anchor(ids=jnp.asarray(anchors), length=jnp.asarray(LENGTHS), positions=positions)
    with jax.disable_jit():
        ids = drafter.propose(params, state, anchor, heads).ids
    seen = np.stack(seen, axis=1)
    for row, (hidden, rows, places) in enumerate(data):
        wanted, chosen = mtp.chain_logits(
            head, table, output, anchors[row], hidden, rows, places, later[row], STEPS
        )
        assert_close(seen[row], wanted, MODEL, f"row {row}")
        assert ids[row].tolist() == chosen


def test_pieces_give_the_state_of_the_whole_at_once(made):
    *_, drafter, params = made
    data = list(context_rows(drafter.config.hidden_size))
    state = absorb_pieces(drafter, params, data)
    for row, (hidden, rows, positions) in enumerate(data):
        whole = Context(
            features=jnp.asarray(hidden)[None], rows=jnp.asarray(rows)[None],
            positions=jnp.asarray(positions)[:, None], length=jnp.array([0]),
            count=jnp.array([len(rows)]),
        )  # fmt: skip
        wanted = jax.jit(drafter.absorb)(params, drafter.init_state(1, 48), whole)
        assert_close(state.cache.k[row], wanted.cache.k[0], MODEL, f"keys of row {row}")
        assert_close(state.cache.v[row], wanted.cache.v[0], MODEL, f"values of row {row}")
        np.testing.assert_array_equal(state.hidden[row], wanted.hidden[0])
        np.testing.assert_array_equal(state.positions[:, row], wanted.positions[:, 0])


def test_a_head_of_its_target_s_folder_round_trips(made):
    """Every tensor under `mtp.` is used once and comes back as it was."""
    folder, *_, drafter, params = made
    stored = {k: v for k, v in load_file(folder / "model.safetensors").items() if k[:4] == "mtp."}
    assert len(stored) == 15
    written = export_params(drafter.weight_rules(), params, float32=[r"mtp\."])
    assert written.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(written[name], value.numpy(), err_msg=name)


MISTAKES = {
    "no head": (lambda t: {k: v for k, v in t.items() if k[:4] != "mtp."}, {}, "no tensor of a"),
    "a part": (lambda t: {k: v for k, v in t.items() if k != "mtp.norm.weight"}, {}, "mtp.norm"),
    "a surplus": (
        lambda t: t | {"mtp.lm_head.weight": t["mtp.fc.weight"].clone()},
        {},
        "mtp.lm_head",
    ),
    "none said": (lambda t: t, {"mtp_num_hidden_layers": 0}, "has no MTP head"),
    "two layers": (lambda t: t, {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
    "own table": (lambda t: t, {"mtp_use_dedicated_embeddings": True}, "dedicated_embeddings"),
    "quantised": (lambda t: t, {"quantization_config": {"bits": 4}}, "quantization_config"),
}


@pytest.mark.parametrize(("tensors", "text", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_what_cannot_be_loaded_is_named(made, tmp_path, tensors, text, words):
    folder, _, target, *_ = made
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= text
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors(load_file(folder / "model.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises((ConfigError, WeightsError), match=words):
        load_drafter(tmp_path, target, "float32")


def test_a_head_of_another_target_is_refused(made):
    folder, _, target, *_ = made
    other = dataclasses.replace(target.config, vocab_size=9, mrope_section=(4, 2, 2))
    with pytest.raises(FitError, match=r"vocab_size: draft 288, target 9.*mrope_section"):
        Qwen35MTP.from_hf(json.loads((folder / "config.json").read_text()), "float32").check_fit(
            other
        )


def test_settings_of_other_drafts_are_refused(made, tmp_path):
    folder, _, target, *_ = made
    with pytest.raises(ConfigError, match="no DFlash draft"):
        load_drafter(folder, target, "float32", embedding_scale=2.0)
    random_draft(tmp_path, folder)
    with pytest.raises(ConfigError, match=r"draft_tokens is 3, but .* blocks of 16"):
        load_drafter(tmp_path, target, "float32", draft_tokens=3)
