"""The parity rule: equal ids, or a first difference that is a numeric tie in fp32.

Ties are made on purpose: in a head that is not tied to the table, the row of an unused id becomes
a copy of another id's row, as it is or a little smaller.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.drafters import NoDraft
from mmflash_jax.engine.offline import Answers, Completion, Timing, answer
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.evaluation import exactness, report
from mmflash_jax.evaluation.exactness import Parity, compare
from mmflash_jax.evaluation.measure import Measured
from mmflash_jax.load import load_target
from tests import tiny
from tests.drafts import two_layer_target

PLACE = 4


class Setup(NamedTuple):
    plan: Plan
    params: dict[str, Any]
    prompts: list[Prompt]
    plain: list[Completion]
    unused: int


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Two prompts and their plain answers, on an untied tiny target that never stops."""
    folder = two_layer_target(tmp_path_factory.mktemp("target"))
    target, params = load_target(folder, "float32")
    encoder = PromptEncoder.from_checkpoint(folder, target)
    prompts = [encoder.encode(Request(text=text, max_tokens=8)) for text in ("Hi", "What now?")]
    plan = Plan(target, NoDraft(), ())
    everything = {"target": params, "drafter": {}}
    plain = answer(plan, everything, prompts, batch=2).completions
    said = {id for completion in plain for id in completion.token_ids}
    unused = next(id for id in range(tiny.VOCAB_SIZE - 1, 0, -1) if id not in said)
    return Setup(plan, everything, prompts, plain, unused)


def with_ids(completion: Completion, ids: Sequence[int]) -> Completion:
    return dataclasses.replace(completion, token_ids=tuple(ids))


def changed(completion: Completion, place: int, id: int) -> Completion:
    ids = list(completion.token_ids)
    ids[place] = id
    return with_ids(completion, ids)


def with_copied_row(setup: Setup, id: int, factor: float) -> dict[str, Any]:
    """The unused id gets `factor` times the head row of `id`."""
    head = setup.params["target"]["lm_head"]["embedding"]
    head = head.at[setup.unused].set(head[id] * factor)
    target = {**setup.params["target"], "lm_head": {"embedding": head}}
    return {**setup.params, "target": target}


def check(setup: Setup, second_row: Completion, params: dict[str, Any] | None = None) -> Parity:
    drafted = [setup.plain[0], second_row]
    return compare(setup.plan, params or setup.params, setup.prompts, drafted, setup.plain)


def test_equal_rows(setup):
    parity = check(setup, setup.plain[1])
    assert parity.equal == (True, True)
    assert parity.divergences == ()
    assert parity.holds


def test_a_wrong_id_is_not_explained(setup):
    wrong = (setup.plain[1].token_ids[PLACE] + 1) % 256
    parity = check(setup, changed(setup.plain[1], PLACE, wrong))
    assert parity.equal == (True, False)
    (divergence,) = parity.divergences
    assert (divergence.row, divergence.place) == (1, PLACE)
    assert divergence.gap is not None
    assert divergence.gap > 1e-3
    assert not divergence.explained
    assert not parity.holds


@pytest.mark.parametrize("place", [0, PLACE])
@pytest.mark.parametrize(
    ("factor", "explained"),
    [(1.0, True), (1 - 1e-6, True), (1 - 1e-3, False), (0.9, False)],
)
def test_a_tie_is_explained_only_below_the_tolerance(setup, place, factor, explained):
    """A19. Both ids are the best two here; how close they are decides."""
    params = with_copied_row(setup, setup.plain[1].token_ids[place], factor)
    parity = check(setup, changed(setup.plain[1], place, setup.unused), params)
    (divergence,) = parity.divergences
    assert divergence.explained is parity.holds is explained
    # A share of the largest magnitude, which may be another logit's.
    assert divergence.gap == pytest.approx(1 - factor, rel=0.3, abs=1e-6)


def test_differences_are_examined_together_as_they_are_alone(setup, monkeypatch):
    ends = [changed(setup.plain[0], 1, 7), changed(setup.plain[1], PLACE, 9)]
    gaps = {}
    for at_once in (1, 2, 16):
        monkeypatch.setattr(exactness, "AT_ONCE", at_once)
        parity = compare(setup.plan, setup.params, setup.prompts, ends, setup.plain)
        assert [(one.row, one.place) for one in parity.divergences] == [(0, 1), (1, PLACE)]
        gaps[at_once] = [one.gap for one in parity.divergences]
    assert gaps[1] == pytest.approx(gaps[2], rel=1e-4)
    assert gaps[1] == pytest.approx(gaps[16], rel=1e-4)
    assert len(set(gaps[1])) == 2


def test_a_tie_of_others_explains_nothing(setup):
    """The two best are equal, but the drafted id is neither."""
    best = setup.plain[1].token_ids[PLACE]
    params = with_copied_row(setup, best, 1.0)
    parity = check(setup, changed(setup.plain[1], PLACE, (best + 1) % 256), params)
    assert not parity.holds


def test_a_tie_does_not_excuse_plain_decoding_that_is_wrong(setup):
    best = setup.plain[1].token_ids[PLACE]
    params = with_copied_row(setup, best, 1.0)
    plain = [setup.plain[0], changed(setup.plain[1], PLACE, (best + 1) % 256)]
    drafted = [setup.plain[0], changed(setup.plain[1], PLACE, setup.unused)]
    assert not compare(setup.plan, params, setup.prompts, drafted, plain).holds


@pytest.mark.parametrize("cut", [0, PLACE])
def test_an_answer_that_only_ends_early_is_no_tie(setup, cut):
    params = with_copied_row(setup, setup.plain[1].token_ids[PLACE], 1.0)
    ids = setup.plain[1].token_ids
    for one, other in ((ids[:cut], ids), (ids, ids[:cut])):
        drafted, plain = with_ids(setup.plain[1], one), with_ids(setup.plain[1], other)
        parity = compare(setup.plan, params, setup.prompts[1:], [drafted], [plain])
        assert parity.divergences[0].place == cut
        assert parity.divergences[0].gap is None
        assert not parity.holds


def test_the_tolerance_follows_the_dtype_and_the_gap_is_in_fp32(setup):
    """bf16 answers may differ where fp32 logits lie 1 % apart, and no further."""
    target = dataclasses.replace(setup.plan.target, dtype="bfloat16")  # pyright: ignore
    plan = Plan(target, NoDraft(), ())
    for factor, explained in ((0.99, True), (0.97, False)):
        params = with_copied_row(setup, setup.plain[1].token_ids[PLACE], factor)
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        drafted = [changed(setup.plain[1], PLACE, setup.unused)]
        parity = compare(plan, narrow, setup.prompts[1:], drafted, setup.plain[1:])
        assert parity.holds is explained, parity


def test_speeds_are_withheld_when_parity_fails(setup, capsys):
    """A16: a verifier that is wrong agrees with any draft, so its speed means nothing."""
    # Counts of a block of two tokens whose draft never stayed.
    counts = [np.array([c.steps, 0]) for c in setup.plain]
    rows = [dataclasses.replace(c, committed=n) for c, n in zip(setup.plain, counts, strict=True)]
    drafted = Answers(rows, Timing(1.0, 30))
    plain = Answers(list(setup.plain), Timing(2.0, 30))
    wrong = changed(setup.plain[1], PLACE, (setup.plain[1].token_ids[PLACE] + 1) % 256)
    for parity in (check(setup, wrong), check(setup, setup.plain[1])):
        measured = Measured(drafted, plain, parity)
        figures = report.figures(setup.plan, measured, accuracy=None, accuracy_blank=None)
        report.print_table(figures)
        printed = capsys.readouterr().out
        assert figures["parity"] is parity.holds
        assert ("PARITY FAILED" in printed) is not parity.holds
        assert ("tokens/s" in printed) is parity.holds
        assert ("speed-up" in printed) is parity.holds
        assert json.loads(json.dumps(figures)) == figures
        speeds = [figures["tokens_per_s"], figures["plain_tokens_per_s"]]
        assert speeds == ([30.0, 15.0] if parity.holds else [None, None])
        assert np.isclose(figures["tau"], 1.0)
