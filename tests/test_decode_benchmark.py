"""`benchmarks.decode` on tiny checkpoints: every method's cell, its acceptance, and the report."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from benchmarks import decode as timing
from benchmarks.acceptance import (
    BLOCK,
    SyntheticRule,
    agreement,
    longest,
    mean_of,
    quantiles,
)
from benchmarks.compiled import Arguments, abstract_decode
from benchmarks.decode_report import plot, rows, speeds, table
from benchmarks.full_size import target_config
from benchmarks.methods import ALL, read_method, read_methods
from benchmarks.random_drafts import assistant_config, write_drafts
from benchmarks.traffic import weight_bytes
from mmflash_jax.compilation import compile_at_once, compiled_programs
from mmflash_jax.decode.records import RUNNING, DecodeState, Verification
from mmflash_jax.drafters import Gemma4Assistant, Proposal
from mmflash_jax.layers.schema import leaves_with_path
from mmflash_jax.layers.scores import Scores
from tests import tiny, tiny_gemma4
from tests.drafts import random_draft

EAGLE3 = {
    "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "draft_vocab_size": 200,
}  # fmt: skip
ASSISTANT = {
    "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_centroids": 24,
    "centroid_intermediate_top_k": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for family, write in {"qwen35": tiny.tiny_qwen35, "gemma4": tiny_gemma4.tiny_gemma4}.items():
        folder = tmp_path_factory.mktemp(family)
        write(folder / "target")
        random_draft(folder / "draft", folder / "target")
        write_drafts(folder, eagle3=EAGLE3, assistant=ASSISTANT)
        made[family] = folder
    return made


CELLS = {
    "qwen35": ("mtp3", "none", "eagle3-tree16"),
    "gemma4": ("dflash", "assistant5", "none", "eagle3"),
}


@pytest.mark.parametrize("family", CELLS)
def test_every_method_is_timed_beside_plain_decoding(family, folders, tmp_path):
    settings = timing.Settings(
        folders[family], drafters=CELLS[family], batches=(2,), contexts=(24,), steps=24, runs=2,
        report=tmp_path / "new" / "decode.json",
    )  # fmt: skip
    records = timing.measure(settings)
    assert json.loads((tmp_path / "new" / "decode.json").read_text()) == records
    by_name = {record["drafter"]: record for record in records}
    assert list(by_name) == ["none", *(name for name in CELLS[family] if name != "none")]
    plain = by_name.pop("none")
    assert plain["tau"] == 1.0
    assert plain["operations"] > 0
    assert "acceptance" not in plain
    for name, record in by_name.items():
        assert record["plain_step_ms"] == plain["step_ms"]
        assert record["acceptance"] == "synthetic"
        # 96 draws, spread evenly; of a tree only if it is as deep as it may be.
        assert record["tau"] == pytest.approx(record["asked_tau"], abs=0.15), name
    sizes = {name: (record["block"], record["most_tau"]) for name, record in by_name.items()}
    expected = {"mtp3": (4, 4), "eagle3-tree16": (16, 6), "dflash": (16, 16), "eagle3": (4, 4)}
    expected["assistant5"] = (6, 6)
    assert sizes == {name: expected[name] for name in by_name}


def test_a_lowered_cell_is_the_program_that_is_timed(folders):
    settings = timing.Settings(folders["qwen35"], batches=(2,), contexts=(24,), steps=2, runs=1)
    cells = list(timing.cells_of(settings, *timing.load(settings)))
    assert [cell.method.name for cell in cells] == ["none", "dflash"]
    compile_at_once(functools.partial(cell.lower, settings) for cell in cells)
    for cell in cells:
        cell.state(settings)
        before = compiled_programs()
        timing.time_cell(settings, cell)
        assert compiled_programs() == before


def test_what_is_timed_is_written_at_once(folders, tmp_path, monkeypatch):
    cells = iter([{"step_ms": 2.0}])
    monkeypatch.setattr(timing, "time_cell", lambda *_: next(cells))
    report = tmp_path / "decode.json"
    settings = timing.Settings(
        folders["qwen35"], drafters=("mtp3", "none"), batches=(1,), report=report,
        compile_first=False,
    )  # fmt: skip
    report.write_text('[{"of": "another run"}]')
    with pytest.raises(StopIteration):
        timing.measure(settings)
    kept, made = json.loads(report.read_text())
    assert kept == {"of": "another run"}
    assert (made["drafter"], made["step_ms"]) == ("none", 2.0)


def test_names_of_methods():
    assert [one.name for one in read_methods(("all", "mtp3"), "Qwen35")] == list(ALL["Qwen35"])
    tree = read_method("eagle3-tree16")
    assert (tree.kind, tree.tokens, tree.is_tree) == ("eagle3", 15, True)
    assert read_method("assistant15").tokens == 15
    assert read_method("eagle3-chain7").tokens == 7
    assert read_method("eagle3").tokens is None
    for wrong in ("mtp", "mtp0", "dflash16", "eagle3-tree1", "all", "eagle-3"):
        with pytest.raises(ValueError, match="is no method"):
            read_method(wrong)


@pytest.mark.parametrize(("tau", "block"), [(1.0, 4), (3.86, 6), (5.7, 16), (15.5, 16)])
def test_drawn_counts_have_the_mean_that_is_asked(tau, block):
    counts = quantiles(tau, block)
    assert np.mean(counts) == pytest.approx(tau, abs=0.02)
    assert 1 <= min(counts) <= max(counts) <= block
    assert mean_of(agreement(tau, block), block) == pytest.approx(tau)


def test_a_mean_that_no_block_has_is_refused():
    with pytest.raises(ValueError, match=r"tau is 6\.5, a block of 6"):
        quantiles(6.5, 6)


# Node 5 is the deepest, on the branch 0 1 3 4 5 of the first tree and 0 2 3 5 of the second.
PARENTS = np.array([[0, 0, 0, 1, 3, 4, 2, 2], [0, 0, 0, 2, 1, 3, 0, 2]], np.int32)
BRANCHES = [[0, 1, 3, 4, 5], [0, 2, 3, 5]]


def _blank_state(batch: int, room: int, block: int) -> DecodeState:
    zero = jnp.zeros(batch, jnp.int32)
    return DecodeState(
        tokens=jnp.zeros((batch, room), jnp.int32), num_tokens=zero + 1, limit=zero + room,
        anchor=zero, length=zero + 8, rope_shift=zero, reason=zero + RUNNING, steps=zero,
        drafted=jnp.zeros((batch, room), bool), committed=jnp.zeros((batch, block), jnp.int32),
        cache=None, draft=None, sampling=None,
    )  # fmt: skip


@pytest.mark.parametrize("is_tree", [False, True])
def test_the_rule_keeps_what_is_drawn_of_the_deepest_branch(is_tree):
    """Whatever the ids are; and no more than there is."""
    state = _blank_state(2, 100, 8)
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.standard_normal((2, 8, 40)), jnp.float32)
    proposal = Proposal(
        ids=jnp.asarray(random.integers(0, 40, (2, 7)), jnp.int32),
        parents=jnp.asarray(PARENTS) if is_tree else None,
    )
    verification = Verification(scores=Scores.of(logits), features=jnp.zeros((2, 8, 0)), cache=None)
    branches = BRANCHES if is_tree else [list(range(8))] * 2
    choice = np.asarray(logits).argmax(-1)
    counts = SyntheticRule(quantiles(2.6, 5))
    rule = jax.jit(lambda now: counts(now, proposal, verification, ()))
    kept = []
    for step in range(200):
        now = dataclasses.replace(state, steps=state.steps + step)
        acceptance = rule(now)
        kept.append(np.asarray(acceptance.count))
        for row, branch in enumerate(branches):
            count = kept[-1][row]
            assert 1 <= count <= len(branch)
            assert acceptance.ids[row, :count].tolist() == choice[row, branch[:count]].tolist()
            if is_tree:
                assert acceptance.path[row, :count].tolist() == branch[:count]
    means = np.mean(kept, axis=0)
    assert means[0] == pytest.approx(2.6, abs=0.05)
    # The second tree holds back the fifth token of the longest draws.
    lost = np.mean(np.array(quantiles(2.6, 5)) == 5) if is_tree else 0.0
    assert means[1] == pytest.approx(2.6 - lost, abs=0.05)


RECORD = {"target": "Qwen35", "device": "card", "kernels": "auto", "context": 1024, "batch": 1}


def test_the_report_says_what_tau_a_method_needs():
    cells = [("none", 4.0, 1), ("dflash", 5.0, 16), ("mtp3", 6.0, 4), ("mtp15", 12.5, 16)]
    records = [
        {**RECORD, "drafter": name, "step_ms": step, "most_tau": most, "asked_tau": 5.7}
        for name, step, most in cells
    ]
    # Timed again: the later record counts.
    records.insert(0, {**records[2], "step_ms": 99.0})
    records.append({**records[2], "batch": 8, "step_ms": 7.0, "plain_step_ms": 5.0})
    found = {(row["batch"], row["method"]): row for row in rows(records)}
    assert found[1, "none"]["beat"] is None
    assert found[1, "mtp3"]["beat"] == pytest.approx(1.5)
    assert found[1, "mtp3"]["match"] == pytest.approx(5.7 * 6 / 5)
    assert found[1, "mtp15"]["match"] == pytest.approx(14.25)
    assert (found[8, "dflash"]["beat"], found[8, "dflash"]["match"]) == (1.4, 5.7)
    lines = table(list(found.values())).splitlines()
    assert "| Qwen35 | 1 | mtp3 | 6.00 | 4 | 1.50 | 6.84 (cannot) |" in lines
    assert "| Qwen35 | 1 | dflash | 5.00 | 16 | 1.25 | 5.70 (its own) |" in lines
    assert "| Qwen35 | 1 | none | 4.00 | 1 | - | 4.56 (cannot) |" in lines
    other = {row["method"]: row for row in rows(records[:5], tau=4.0) if row["batch"] == 1}
    assert other["mtp15"]["match"] == pytest.approx(10.0)


def test_speeds_stand_beside_the_roofs(tmp_path):
    reached = {
        **RECORD, "drafter": "none", "step_ms": 2.0, "tokens_per_s": 500.0,
        "operations": 989 * 10**8,
        "bytes_moved": 43 * 10**8, "bandwidth_share": 0.5, "memory_bytes": None,
    }  # fmt: skip
    drafted = {
        **reached, "drafter": "dflash", "plain_tokens_per_s": 500.0, "tokens_per_s": 1250.0,
        "operations": None, "memory_bytes": 14.26e9, "profile": {"launches": 517},
    }  # fmt: skip
    _, _, plain, with_draft = speeds([reached, drafted]).splitlines()
    assert plain == "| Qwen35 | 1 | 1,024 | none | 2.00 | 500 | - | 50 % | 5 % | - | - |"
    assert (
        with_draft
        == "| Qwen35 | 1 | 1,024 | dflash | 2.00 | 1,250 | 2.50 | 50 % | - | 14.3 | 517 |"
    )
    plot([reached, {**reached, "target": "Gemma4"}, drafted], tmp_path / "roofline.png")
    one = tmp_path / "one.png"
    plot([reached], one)
    # A panel for each target.
    with Image.open(tmp_path / "roofline.png") as wide, Image.open(one) as narrow:
        assert wide.width > 1.8 * narrow.width
        assert len(np.unique(np.asarray(narrow))) > 10
    many = [{**reached, "drafter": name} for name in ("none", "mtp", "dflash", "eagle3")]
    plot(many, tmp_path / "many.png")
    # A colour of its own for each.
    with Image.open(tmp_path / "many.png") as picture:
        seen = {tuple(pixel) for pixel in np.asarray(picture)[..., :3].reshape(-1, 3)}
    wanted = [(127, 127, 127), (31, 119, 180), (255, 127, 14), (44, 160, 44)]
    assert [colour for colour in wanted if colour in seen] == wanted
    with pytest.raises(SystemExit, match="nothing to draw"):
        plot([drafted], one)


def test_without_mmflash_nothing_is_matched():
    (row,) = rows([{**RECORD, "drafter": "mtp3", "step_ms": 6.0, "most_tau": 4}])
    assert (row["beat"], row["match"]) == (None, None)
    assert "| Qwen35 | 1 | mtp3 | 6.00 | 4 | - | - |" in table([row])


@pytest.mark.parametrize("family", ["qwen35", "gemma4"])
def test_drafts_of_published_widths_fit_their_targets(family):
    """And what a step must read grows with every run of the draft."""
    plans = {}
    for name in ALL["Qwen35" if family == "qwen35" else "Gemma4"]:
        plan, params, _ = abstract_decode(Arguments(family=family, drafter=name, layers=12))
        plans[name] = plan, weight_bytes(plan, params), params["drafter"]
    read = {name: bytes for name, (_, bytes, _) in plans.items()}
    small, large = ("mtp3", "mtp15") if family == "qwen35" else ("assistant5", "assistant15")
    runs = plans[large][0].drafter.block - plans[small][0].drafter.block
    sizes = {path[0]: 0 for path, _ in leaves_with_path(plans[small][2])}
    for path, leaf in leaves_with_path(plans[small][2]):
        sizes[path[0]] += leaf.size * leaf.dtype.itemsize
    own = sum(sizes.values())
    # An MTP head reads the target's head too; an assistant a few rows of its own table.
    own += 2 * 248320 * 2560 if family == "qwen35" else -sizes["embed_tokens"]
    own -= sizes.get("token_ordering", 0)
    assert read[large] - read[small] == runs * own
    assert longest(plans["eagle3-tree16"][0].drafter) == 6
    assert plans["dflash"][0].drafter.block == BLOCK


def test_an_assistant_is_the_published_one():
    """Names and shapes are those of transformers' model, parameters as many as are published."""
    config = assistant_config(target_config("gemma4").to_dict()["text_config"])
    with torch.device("meta"):
        model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(**config))
    theirs = {
        name: tuple(value.shape)
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    drafter = Gemma4Assistant.from_hf(config, "bfloat16")
    shape_at = {path: leaf.shape for path, leaf in leaves_with_path(drafter.abstract_params())}
    ours = {rule.hf: rule.stored(shape_at[rule.path]) for rule in drafter.weight_rules()}
    assert ours == theirs
    ordering = "masked_embedding.token_ordering"
    count = sum(int(np.prod(shape)) for name, shape in ours.items() if name != ordering)
    assert count == 78_517_764
