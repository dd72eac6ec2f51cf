"""The experiment's lockstep training is the trainer's, and its report adds up."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from benchmarks import mmflash_report
from benchmarks.lockstep import Lockstep, collate_apart
from mmflash_jax.config_drafts import MTPShape
from mmflash_jax.drafters import DFlash
from mmflash_jax.training.step import Recipe, make_optimiser
from mmflash_jax.training.trainer import new_drafter
from tests.drafts import two_layer_target
from tests.training.runs import WIDTH, Runs


@pytest.fixture(params=["dflash", pytest.param("mtp", marks=pytest.mark.slow)])
def runs(request, tmp_path):
    made = Runs(two_layer_target(tmp_path / "target"))
    if request.param == "mtp":
        shape = MTPShape(draft_tokens=2)
        drafter = new_drafter(shape, made.folder, made.target, encoder=None)  # pyright: ignore[reportArgumentType]
        made.plan = dataclasses.replace(made.plan, drafter=drafter)
    return made


def test_runs_in_lockstep_are_those_of_the_trainer(runs, tmp_path):
    random = np.random.default_rng(1)
    plain = runs.rows
    weighted = [
        dataclasses.replace(row, weight=random.uniform(0.5, 2, len(row.ids)).astype(np.float32))
        for row in plain
    ]
    is_chain = not isinstance(runs.plan.drafter, DFlash)
    # Of a chain one variant, for its compile time, and the loss that needs the target's answers.
    variants = [weighted] if is_chain else [plain, weighted]
    loss = {"loss": "kl" if is_chain else "ce"}
    config = runs.config(tmp_path / "run", optimiser={"seed": 3}, objective=loss)
    recipe = Recipe(runs.plan, make_optimiser(config.optimiser), config.objective)
    weight = np.zeros((len(variants), len(plain), WIDTH), np.float32)
    for variant, rows in enumerate(variants):
        for index, row in enumerate(rows):
            weight[variant, index, : len(row.ids)] = row.weight
    score = np.full(weight.shape[1:], np.nan)
    data = jax.device_put(collate_apart(plain, WIDTH))
    lockstep = Lockstep(recipe, config, runs.target_params, data, jax.numpy.asarray(weight), score)
    made, metrics = lockstep.train(3)
    for variant, rows in enumerate(variants):
        runs.rows = rows
        wanted = runs.fit(dataclasses.replace(config, output=tmp_path / str(variant)))
        jax.tree.map(
            lambda a, b, v=variant: np.testing.assert_allclose(a[v], b, rtol=2e-3, atol=2e-4),
            made, wanted,
        )  # fmt: skip
        last = (tmp_path / str(variant) / "metrics.csv").read_text().splitlines()[-1].split(",")
        assert metrics["loss"][variant] == pytest.approx(float(last[1]), rel=1e-4)
    different = jax.tree.map(lambda x: float(abs(x[0] - x[-1]).max()), made)
    assert (max(jax.tree.leaves(different)) > 1e-3) == (len(variants) > 1)


def record(variant: str, seed: int, tau: float) -> dict:
    of = {"top": tau / 20, "middle": 0.5, "zero": None}
    return {
        "target": "demo", "steps": 10, "batch": 8, "training_prompts": 64, "variant": variant,
        "seed": seed, "tau": tau, "tau_by_visual_bucket": of, "acceptance_by_visual_bucket": of,
        "accepted_per_position": [0.5, 0.25], "rejection_correlation": {"pearson": None},
        "weight_share_of_top": 0.25, "parity": True,
    }  # fmt: skip


def test_the_table_has_mean_and_spread_over_seeds(tmp_path):
    records = [record("mmflash", 0, 3.0), record("dflash", 1, 4.0), record("dflash", 0, 2.0)]
    joined = mmflash_report.join(json.loads(json.dumps(records)))
    assert [(r["variant"], r["seed"]) for r in joined] == [
        ("dflash", 0), ("dflash", 1), ("mmflash", 0),
    ]  # fmt: skip
    table = mmflash_report.table(joined)
    # The sample's standard deviation of 2 and 4 is the root of 2; one seed has none.
    assert "| dflash | 2 | 3.000 ± 1.414 | 0.150 ± 0.071 | 0.500 ± 0.000 | - |" in table
    assert "| mmflash | 1 | 3.000 | 0.150 |" in table
    assert "Parity holds in 3 of 3 runs." in table
    mmflash_report.plot(joined, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_there_twice_is_refused():
    with pytest.raises(ValueError, match=r"two records of .*'variant': 'dflash', 'seed': 0"):
        mmflash_report.join([record("dflash", 0, 2.0), record("dflash", 0, 3.0)])
