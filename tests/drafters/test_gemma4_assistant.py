"""Gemma 4's assistant against transformers' own, fp32."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmflash_jax.decode.prefill import run_prompts
from mmflash_jax.decode.records import Plan
from mmflash_jax.drafters import FitError, Gemma4Assistant, Heads, NoDraft
from mmflash_jax.drafters.base import most_likely
from mmflash_jax.layers.cache import CachedKeys, empty_cache, write_cache
from mmflash_jax.load import load_drafter, load_target
from mmflash_jax.weights import WeightsError, export_params
from mmflash_jax.weights.hf_config import ConfigError
from pallas_kernels import product
from tests.drafters import assistant
from tests.drafts import anchor_of, context_of
from tests.targets.prompts import make_prompt
from tests.tiny_gemma4 import FULL, SLIDING, tiny_gemma4
from tests.tolerances import MODEL, assert_close

STEPS, WINDOW = 5, 8
# Below the window, at it, where one token more is seen than the target sees, and far behind it.
LENGTHS = np.array([3, 8, 9, 10, 40], np.int32)
HEADS = {"centroids": {}, "dense": {"use_ordered_embeddings": False}}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma4")
    model = tiny_gemma4(folder)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    return *load_target(folder, "float32"), model, text


@pytest.fixture(scope="module", params=HEADS)
def made(request, target, tmp_path_factory):
    """transformers' model and ours of the same folder."""
    folder = tmp_path_factory.mktemp("assistant")
    model = assistant.tiny_assistant(folder, target[3], **HEADS[request.param])
    return model, *load_drafter(folder, target[0], "float32", draft_tokens=STEPS), folder


def cached(kind, rows, slots):
    """A cache of ragged rows `[P, K, H]`, written in two pieces, junk wherever none stands."""
    ring = kind == SLIDING
    _, heads, width = rows[0][0].shape
    cache = jax.tree.map(
        lambda x: x + 1e3, empty_cache(len(rows), heads, slots, width, jnp.dtype("float32"))
    )
    most = max(len(k) for k, _ in rows)
    k, v = (np.stack([np.pad(r[i], ((0, most - len(r[i])), (0, 0), (0, 0))) for r in rows])
            for i in (0, 1))  # fmt: skip
    half = LENGTHS // 2
    later = np.minimum(half[:, None] + np.arange(most), most - 1)[..., None, None]
    first, second = ((k, v), (np.take_along_axis(x, later, axis=1) for x in (k, v)))
    for (keys, values), start, count in ((first, 0 * half, half), (second, half, LENGTHS - half)):
        arrays = map(jnp.asarray, (keys, values, start, count))
        cache = write_cache(cache, *arrays, ring=ring)
    return CachedKeys(cache=cache, ring=ring)


def test_chain_logits_match_transformers(target, made):
    """Ragged rows, a ring and a plain cache, scalars and norms all random."""
    plan, params, reference, _ = target
    model, drafter, weights, _ = made
    rng = np.random.default_rng(1)
    shapes = {SLIDING: (2, 16), FULL: (2, 32)}
    data = {
        kind: [rng.normal(size=(2, n, *shape)).astype(np.float32) for n in LENGTHS]
        for kind, shape in shapes.items()
    }
    keys = {kind: cached(kind, rows, 14 if kind == SLIDING else 48) for kind, rows in data.items()}
    hidden = rng.normal(size=(len(LENGTHS), drafter.config.backbone_hidden_size))
    hidden = hidden.astype(np.float32)
    anchors = rng.integers(0, 256, len(LENGTHS)).astype(np.int32)
    junk = np.full((len(LENGTHS), 1, hidden.shape[1]), 1e4, np.float32)
    features = jnp.concatenate([jnp.asarray(hidden)[:, None], jnp.asarray(junk)], axis=1)
    state = drafter.init_state(len(LENGTHS), 48)
    for taken, count in ((features, 1), (jnp.asarray(junk), 0)):
        counts = np.full(len(LENGTHS), count)
        state = drafter.absorb(weights, state, context_of(taken, LENGTHS - count, counts))
    seen: Any = []

    def pick(scored, first=0):
        assert int(first) == len(seen)
        seen.append(np.asarray(scored.make())[:, 0])
        return most_likely(scored)

    heads = Heads(
        embed=lambda ids: plan.embed_raw(params, ids),
        logits=lambda hidden: product.logits(hidden, plan.head(params)),
        pick=pick,
        keys_values=keys.__getitem__,
    )
    anchor = anchor_of(anchors, LENGTHS)
    with jax.disable_jit():
        ids = drafter.propose(weights, state, anchor, heads).ids
    seen = np.stack(seen, axis=1)
    table = reference.model.language_model.embed_tokens(torch.arange(288)).detach()
    for row, length in enumerate(LENGTHS):
        states = {
            kind: tuple(torch.from_numpy(part).transpose(0, 1)[None] for part in data[kind][row])
            for kind in shapes
        }
        wanted, chosen = assistant.chain_logits(
            model, table, int(anchors[row]), torch.from_numpy(hidden[row]), states, int(length),
            STEPS,
        )  # fmt: skip
        # transformers gives excluded tokens the least logit minus one, here they have none.
        known = np.isfinite(seen[row])
        wanted = wanted.numpy()
        if drafter.config.num_centroids is not None:
            count = assistant.TOP * 288 // assistant.CENTROIDS
            np.testing.assert_array_equal(known.sum(-1), count)
            np.testing.assert_array_equal(known, wanted > wanted.min(-1, keepdims=True))
        assert_close(seen[row][known], wanted[known], MODEL, f"row {row}")
        assert ids[row].tolist() == chosen


def test_keys_and_values_are_those_that_transformers_shares(target):
    """Of the last layer of each kind that makes its own: here the second sliding one."""
    plan, params, reference, _ = target
    ids = np.random.default_rng(2).integers(3, 256, 20)
    with torch.no_grad():
        wanted = reference.model(
            input_ids=torch.from_numpy(ids)[None], return_shared_kv_states=True
        ).shared_kv_states
    prompt = dataclasses.replace(make_prompt(plan, 20, seed=0), ids=ids.astype(np.int32))
    params = {"target": params, "drafter": {}}
    cache = run_prompts(Plan(plan, NoDraft(), ()), params, [prompt], capacity=32).cache
    for kind, (keys, values) in wanted.items():
        for place in (12, 19):
            row = plan.keys_values(cache, kind).row(jnp.array([place]))
            for ours, theirs in zip(row, (keys, values), strict=True):
                assert_close(ours[0, 0], theirs[0, :, place], MODEL, f"{kind} {place}")


def test_every_tensor_is_used_and_has_its_place(made):
    _, drafter, weights, folder = made
    stored = load_file(folder / "model.safetensors")
    written = export_params(drafter.weight_rules(), weights, float32=[""])
    assert stored.keys() == written.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(written[name], value.numpy())


def written(made, folder, tensors=lambda t: t, text=(), **top):
    """The assistant's folder with changes."""
    *_, source = made
    config = json.loads((source / "config.json").read_text()) | top
    config["text_config"] |= dict(text)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors(load_file(source / "model.safetensors")), folder / "model.safetensors")
    return folder


MISTAKES = {
    "part": ({"tensors": lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}},
             "missing: model.norm.weight"),
    "surplus": ({"tensors": lambda t: t | {"model.norm.bias": torch.zeros(3)}},
                "unexpected: model.norm.bias"),
    "own keys": ({"text": {"num_kv_shared_layers": 1}}, "num_kv_shared_layers is 1"),
    "layer inputs": ({"text": {"hidden_size_per_layer_input": 8}}, "hidden_size_per_layer_input"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "centroids": ({"use_ordered_embeddings": True, "num_centroids": 25}, "num_centroids 25"),
    "width": ({"backbone_hidden_size": 60}, "backbone_hidden_size: draft 60, .* 64"),
    "window": ({"text": {"sliding_window": 9}}, "window of sliding_attention: draft 9, target 8"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_what_does_not_fit_is_named(target, made, tmp_path, change, words):
    folder = written(made, tmp_path, **change)
    with pytest.raises((ConfigError, FitError, WeightsError), match=words):
        load_drafter(folder, target[0], "float32")


def test_another_family_of_targets_is_refused(made, qwen35):
    folder = made[-1]
    config = json.loads((folder / "config.json").read_text())
    other, _ = load_target(qwen35.folder, "float32")
    with pytest.raises(FitError, match="the target has no such Gemma 4 layer"):
        Gemma4Assistant.from_hf(config, "float32").check_fit(other.config)
