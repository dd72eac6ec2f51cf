"""EAGLE-3 against a torch draft written from its description, fp32: logits, chains and trees."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mmflash_jax.drafters import Anchor, Context, Eagle3, FitError, Heads
from mmflash_jax.drafters.base import log_likelihood, most_likely
from mmflash_jax.drafters.eagle3_config import default_layer_ids
from mmflash_jax.load import load_drafter, load_target
from mmflash_jax.weights import WeightsError, export_params
from mmflash_jax.weights.hf_config import ConfigError
from pallas_kernels import product
from tests import tiny
from tests.drafters.eagle3 import KNOWN, Head, eagle_config, layer_config, speculators_config
from tests.drafts import random_draft
from tests.targets.trees import branch
from tests.tolerances import MODEL, assert_close

LAYERS = (1, 2)
# A row of one token, one that ends inside a piece, one that is longer than the window.
LENGTHS = np.array([1, 13, 30])
PIECES = [[1, 9, 9], [0, 1, 9], [0, 3, 3], [0, 0, 9]]
ANCHORS = np.array([7, 130, 65])


def variants(text):
    """Configs of both layouts with every switch in both positions."""
    qwen3 = layer_config(
        text, model_type="qwen3", layer_types=["sliding_attention"], sliding_window=9
    )
    return {
        "eagle": eagle_config(layer_config(text), LAYERS),
        "eagle, whole vocabulary": eagle_config(
            layer_config(text, attention_bias=True), LAYERS, draft_vocab_size=text["vocab_size"],
            fc_norm=True, norm_output=True,
        ),
        "speculators": speculators_config(
            qwen3, LAYERS, norm_before_residual=True, norm_before_fc=True
        ),
    }  # fmt: skip


NAMES = ["eagle", "eagle, whole vocabulary", "speculators"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Folder, plan and parameters of a target of three layers."""
    folder = tmp_path_factory.mktemp("target")
    kinds = ["linear_attention"] * 2 + ["full_attention"]
    tiny.tiny_qwen35(folder, tied=False, text={"num_hidden_layers": 3, "layer_types": kinds})
    return folder, *load_target(folder, "float32")


def text_of(folder):
    return json.loads((folder / "config.json").read_text())["text_config"]


@pytest.fixture(scope="module", params=NAMES)
def made(request, target, tmp_path_factory):
    """The torch draft, its folder, and ours loaded from there."""
    folder, plan, _ = target
    head = Head(variants(text_of(folder))[request.param], captured=len(LAYERS))
    saved = head.save(tmp_path_factory.mktemp("eagle3"))
    return head, saved, *load_drafter(saved, plan, "float32")


def known_tokens(width):
    """Features and table rows (of images too) of every row."""
    rng = np.random.default_rng(7)
    for length in LENGTHS:
        yield (
            rng.normal(size=(length, len(LAYERS) * width)).astype(np.float32),
            rng.normal(size=(length, width)).astype(np.float32),
        )


def absorbed(drafter, params, pieces=PIECES):
    """The state after ragged pieces; what lies behind a piece is junk."""
    data = list(known_tokens(drafter.config.hidden_size))
    state, at = drafter.init_state(len(data), 48), np.zeros(len(data), np.int32)
    absorb = jax.jit(drafter.absorb)
    for counts in pieces:
        width = max(max(counts), 9)
        features = np.full((len(data), width, data[0][0].shape[1]), 1e3, np.float32)
        rows = np.full((len(data), width, data[0][1].shape[1]), 1e3, np.float32)
        for b, count in enumerate(counts):
            here = slice(at[b], at[b] + count)
            features[b, :count], rows[b, :count] = data[b][0][here], data[b][1][here]
        context = Context(
            features=jnp.asarray(features), rows=jnp.asarray(rows),
            positions=jnp.full((3, len(data), width), 777), length=jnp.asarray(at),
            count=jnp.asarray(counts),
        )  # fmt: skip
        state = absorb(params, state, context)
        at = at + np.array(counts, np.int32)
    np.testing.assert_array_equal(at, LENGTHS)
    return data, state


def proposal_of(drafter, params, state, target, *, asked=None):
    """What is proposed after `ANCHORS`; `asked` collects the logits `[B, W, V]` of each level."""
    _, plan, target_params = target

    def record(logits, first):
        if asked is not None:
            assert int(first) == len(asked)
            asked.append(np.asarray(logits))

    def pick(scored, first=0):
        record(scored.make(), first)
        return most_likely(scored)

    def rank(logits, first=0):
        record(logits, first)
        return log_likelihood(logits)

    heads = Heads(
        embed=lambda ids: plan.embed_raw(target_params, ids),
        logits=lambda hidden: product.logits(hidden, plan.head(target_params)),
        pick=pick,
        rank=rank,
    )
    anchor = Anchor(
        ids=jnp.asarray(ANCHORS), length=jnp.asarray(LENGTHS), positions=jnp.full((3, 3), 777)
    )
    with jax.disable_jit():
        return drafter.propose(params, state, anchor, heads)


def table_of(target):
    return np.array(target[2]["embed_tokens"]["embedding"])


def test_chain_logits_match_the_reference(made, target):
    """Ragged rows and pieces, rotary positions of the target unused, every norm random."""
    head, _, drafter, params = made
    drafter = dataclasses.replace(drafter, draft_tokens=4)
    data, state = absorbed(drafter, params)
    asked = []
    proposal = proposal_of(drafter, params, state, target, asked=asked)
    assert proposal.parents is None
    ids = np.asarray(proposal.ids)
    for row, (features, rows) in enumerate(data):
        for place in range(4):
            known = [ANCHORS[row], *ids[row, :place]]
            wanted = head.logits(features, rows, table_of(target), known)
            got, said = asked[place][row, 0], np.isfinite(wanted)
            np.testing.assert_array_equal(np.isfinite(got), said)
            assert_close(got[said], wanted[said], MODEL, f"row {row}, draft {place}")
            assert ids[row, place] == wanted.argmax()


def grown_by_hand(head, target, features, rows, anchor, *, nodes, top_k, depth):
    """The likeliest branches of a tree (EAGLE-2): sorted (log-likelihood, ids of the branch)."""
    level, every = [(0.0, ())], []
    for _ in range(depth):
        found = []
        for score, ids in level:
            logits = head.logits(features, rows, table_of(target), [anchor, *ids])
            likely = torch.from_numpy(logits).log_softmax(-1).numpy()
            best = np.argsort(-likely, kind="stable")[:top_k].tolist()
            found += [(score + float(likely[id]), (*ids, id)) for id in best]
        every += found
        level = sorted(found, key=lambda one: -one[0])[:top_k]
    return sorted(every, key=lambda one: -one[0])[: nodes + 1]


@pytest.mark.parametrize(("nodes", "top_k", "depth"), [(9, 3, 3), (5, 2, 4)])
def test_a_tree_holds_the_likeliest_branches(made, target, nodes, top_k, depth):
    """Ids, shape and order of the tree, and the logits that it is grown from."""
    head, _, drafter, params = made
    drafter = dataclasses.replace(drafter, draft_tokens=nodes, top_k=top_k, depth=depth)
    data, state = absorbed(drafter, params)
    proposal = proposal_of(drafter, params, state, target)
    ids, parents = np.asarray(proposal.ids), np.asarray(proposal.parents)
    assert (ids.shape, parents.shape) == ((3, nodes), (3, nodes + 1))
    for row, (features, rows) in enumerate(data):
        wanted = grown_by_hand(
            head, target, features, rows, ANCHORS[row], nodes=nodes, top_k=top_k, depth=depth
        )
        assert wanted[nodes - 1][0] - wanted[nodes][0] > 1e-3, "no near tie at the edge"
        got = [tuple(ids[row, [n - 1 for n in branch(parents[row], node)[1:]]].tolist())
               for node in range(1, nodes + 1)]  # fmt: skip
        assert all(parents[row, node] < node for node in range(1, nodes + 1))
        assert got == [ids for _, ids in wanted[:nodes]]


def test_narrower_trees_are_the_first_nodes(made, target):
    """A server that verifies fewer nodes grows as few levels as they can need."""
    *_, drafter, params = made
    drafter = dataclasses.replace(drafter, draft_tokens=9, top_k=3, depth=3)
    _, state = absorbed(drafter, params)
    whole = proposal_of(drafter, params, state, target)
    for tokens in (1, 2, 5):
        fewer = dataclasses.replace(drafter, draft_tokens=tokens)
        asked = []
        part = proposal_of(fewer, params, state, target, asked=asked)
        assert len(asked) == min(3, tokens)
        np.testing.assert_array_equal(part.ids, whole.ids[:, :tokens])
        np.testing.assert_array_equal(part.parents, whole.parents[:, : tokens + 1])


def test_pieces_give_the_state_of_the_whole_at_once(made):
    *_, drafter, params = made
    _, state = absorbed(drafter, params)
    _, wanted = absorbed(drafter, params, [LENGTHS.tolist()])
    for row, length in enumerate(LENGTHS):
        for name in ("k", "v"):
            got, right = (getattr(s.cache, name)[row][:, 1:length] for s in (state, wanted))
            assert_close(got, right, MODEL, f"{name} of row {row}")
    assert_close(state.hidden, wanted.hidden, MODEL, "hidden")


def test_what_is_stored_round_trips(made):
    """Every tensor of the draft is used once and comes back as it was, maps as integers."""
    _, folder, drafter, params = made
    stored = load_file(folder / "model.safetensors")
    written = export_params(drafter.weight_rules(), params, float32=[""])
    assert written.keys() == stored.keys()
    for name, value in stored.items():
        assert written[name].dtype == value.numpy().dtype, name
        np.testing.assert_array_equal(written[name], value.numpy(), err_msg=name)


def test_copies_of_the_target_s_tensors_are_accepted(made, target, tmp_path):
    head, _, drafter, _ = made
    copies = {
        "embed_tokens.weight": torch.zeros(288, 64),
        "verifier_norm.weight": torch.zeros(64),
        "verifier_lm_head.weight": torch.zeros(KNOWN, 64),
    }
    again, _ = load_drafter(head.save(tmp_path, **copies), target[1], "float32")
    assert again == drafter


def test_layers_of_the_target(target, tmp_path):
    """Boundaries count from the embedding, except where an EAGLE list begins with 1."""
    layer = layer_config(text_of(target[0]))

    def ids(config):
        return Eagle3.from_hf(config, "float32").config.target_layer_ids

    def eagle(*given):
        return eagle_config(layer, ()) | {
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(given)}
        }

    assert ids(eagle(1, 17, 32)) == (1, 17, 32)
    assert ids(eagle(2, 18, 33)) == (1, 17, 32)
    assert ids(eagle(24, 30, 36)) == (23, 29, 35)
    assert ids(speculators_config(layer, (0, 17))) == (0, 17)
    assert ids(eagle()) is None
    assert default_layer_ids(32) == (1, 15, 28)
    unnamed = Eagle3.from_hf(eagle(), "float32")
    deep = dataclasses.replace(target[1].config, layer_types=("full_attention",) * 32)
    assert unnamed.for_target(deep).capture == (1, 15, 28)
    with pytest.raises(ConfigError, match="target of 3 layers"):
        unnamed.for_target(target[1].config)
    for wrong in (eagle(0, 2), eagle(2, 2), eagle("2")):
        with pytest.raises(ConfigError, match="eagle_aux_hidden_state_layer_ids"):
            ids(wrong)


BAD_FIELDS = {
    "hidden_act": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "mlp_bias": ({"mlp_bias": True}, "mlp_bias is True"),
    "rope": ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type is 'llama3'"),
    "mrope": ({"rope_scaling": {"mrope_section": [1, 2]}}, "mrope_section is"),
    "vocabulary": ({"draft_vocab_size": 999}, "draft_vocab_size is 999.*288"),
    "no vocabulary": ({"draft_vocab_size": None}, "lacks 'draft_vocab_size'"),
    "no features": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    "twice": (
        {"eagle_config": {"norm_output": True}, "norm_output": False},
        "norm_output is True in eagle_config but False",
    ),
    "norms": ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
    "window": ({"layer_types": ["sliding_attention"]}, "sliding_window None"),
}


@pytest.mark.parametrize(("fields", "words"), BAD_FIELDS.values(), ids=BAD_FIELDS.keys())
def test_a_config_that_asks_for_more_is_refused(target, fields, words):
    config = eagle_config(layer_config(text_of(target[0])), LAYERS) | fields
    with pytest.raises(ConfigError, match=words):
        Eagle3.from_hf(config, "float32")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"embed_requires_grad": True}, "embed_requires_grad is True"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type is 'peagle'"),
    ],
)
def test_other_drafts_of_speculators_are_refused(target, fields, words):
    config = speculators_config(layer_config(text_of(target[0])), LAYERS) | fields
    with pytest.raises(ConfigError, match=words):
        Eagle3.from_hf(config, "float32")


def shifted(tensors):
    return tensors | {"d2t": tensors["d2t"] - 1}


MISTAKES = {
    "a part": (lambda t: {k: v for k, v in t.items() if k != "norm.weight"}, "missing: norm"),
    "a surplus": (lambda t: t | {"layers.1.x": torch.zeros(2)}, r"unexpected: layers\.1\.x"),
    "the other layout": (
        lambda t: {k.replace("midlayer.", "layers.0."): v for k, v in t.items()},
        "missing: midlayer.*unexpected: layers.0",
    ),
    "absolute ids": (lambda t: t | {"d2t": t["d2t"] + torch.arange(KNOWN)}, "minus the draft's"),
    "maps that differ": (shifted, "contradict each other|minus the draft's"),
    "a map of another target": (lambda t: t | {"t2d": torch.ones(9).bool()}, "wrong shape: t2d"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_tensors_that_do_not_fit_are_named(target, tmp_path, change, words):
    head = Head(eagle_config(layer_config(text_of(target[0])), LAYERS), captured=2)
    head.save(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(WeightsError, match=f"(?s){words}"):
        load_drafter(tmp_path, target[1], "float32")


def test_a_draft_of_another_target_is_refused(made, target):
    *_, drafter, _ = made
    other = dataclasses.replace(
        target[1].config, hidden_size=32, vocab_size=9, layer_types=("full_attention",)
    )
    with pytest.raises(FitError) as error:
        drafter.check_fit(other)
    for words in ("draft 64, target 32", "vocab_size: draft 288, target 9", "layers [1, 2]"):
        assert words in str(error.value)


def test_shapes_of_chains_and_trees(made, target, tmp_path):
    _, folder, drafter, _ = made
    assert drafter.draft_tokens == (4 if "speculators_model_type" in made[0].own else 3)

    def load(**settings):
        return load_drafter(folder, target[1], "float32", **settings)[0]

    assert load(draft_tokens=6).block == 7
    tree = load(draft_top_k=4)
    assert (tree.draft_tokens, tree.top_k, tree.depth) == (15, 4, 5)
    tree = load(draft_top_k=2, draft_depth=3, draft_tokens=10)
    assert (tree.block, tree.top_k, tree.depth) == (11, 2, 3)
    with pytest.raises(ConfigError, match=r"draft_tokens is 11.*draft_top_k 2.*at most 10"):
        load(draft_top_k=2, draft_depth=3, draft_tokens=11)
    with pytest.raises(ConfigError, match="draft_depth is 3, but a chain"):
        load(draft_depth=3)
    with pytest.raises(ConfigError, match="draft_top_k is 999"):
        load(draft_top_k=999)
    random_draft(tmp_path, target[0])
    with pytest.raises(ConfigError, match=r"draft_top_k is 2, but .* is no EAGLE-3 draft"):
        load_drafter(tmp_path, target[1], "float32", draft_top_k=2)
