"""DFlash against MMFlash on a demo target: same data, steps and compute, several seeds.

    python -m benchmarks.mmflash_vs_dflash prepare --target demo --folder runs/compare
    python -m benchmarks.mmflash_vs_dflash run --target demo --folder runs/compare --seeds 0 1 2
    python -m benchmarks.mmflash_vs_dflash report --folder runs/compare

`prepare` lets the target answer the prompts and scores the answers, once for all runs. `run` trains
one draft for each variant and seed and measures it on held-out charts, greedily, in fp32, where
drafted ids equal plain ones. Any number of `run` may work side by side, for other targets, seeds,
steps or variants; each writes a file of its own, which `report` joins.

The variants of a seed are trained in lockstep: `jax.vmap` of the trainer's own `train_step` over
their states and token weights. They see the same batches, anchors and initial draft, and the
target's features are made once for all of them. Nothing else differs from `train.py`.
"""

import dataclasses
import functools
import json
import logging
import pickle
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grain
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tqdm import tqdm

from benchmarks import mmflash_report
from mmflash_jax.compilation import keep_compiled_programs
from mmflash_jax.config import DraftShape, TrainConfig, VisualConfig
from mmflash_jax.config_files import find_config, read_yaml
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.drafters import NoDraft
from mmflash_jax.drafters.dflash import DFlash
from mmflash_jax.engine.prompts import PromptEncoder
from mmflash_jax.evaluation import report
from mmflash_jax.evaluation.visual import share_of_top
from mmflash_jax.load import default_dtype, load_target, stop_ids
from mmflash_jax.registry import pair
from mmflash_jax.training.answers import answers_of
from mmflash_jax.training.data import Batch, Row, collate, make_row, prompt_requests
from mmflash_jax.training.divergence import Scores
from mmflash_jax.training.export import as_shipped
from mmflash_jax.training.held_out import HeldOut, answer_held_out, evaluate
from mmflash_jax.training.prompts import Prompts, places_of
from mmflash_jax.training.step import (
    METRICS,
    Recipe,
    TrainState,
    make_optimiser,
    make_state,
    train_step,
)
from mmflash_jax.training.trainer import draft_config, media_features
from mmflash_jax.training.visual_kl import score_all, weights_of

CONFIGS = {"demo": "demo_qwen35.yaml", "demo-gemma4": "demo_gemma4.yaml"}
VARIANTS = {
    "dflash": VisualConfig(strength=0.0),
    "mmflash": VisualConfig(),
    "lambda1": VisualConfig(strength=1.0),
    "lambda4": VisualConfig(strength=4.0),
    "lambda8": VisualConfig(strength=8.0),
    "patchmask": VisualConfig(ablation="patchmask"),
    "confidence": VisualConfig(gate="confidence"),
    "groups": VisualConfig(weighting="groups"),
}
Name = Literal[
    "dflash", "mmflash", "lambda1", "lambda4", "lambda8", "patchmask", "confidence", "groups"
]
STEPS_AT_ONCE = 25


@dataclass(frozen=True)
class Prepare:
    """Answers of the target, their visual scores, image features, held-out prompts."""

    target: Literal["demo", "demo-gemma4"] = "demo"
    folder: Path = Path("runs/mmflash_vs_dflash")
    count: int = 10000
    """Training prompts."""
    held_out: int = 512
    """Held-out charts of the evaluation."""
    ablations: tuple[Literal["blank", "patchmask", "pixelate", "noise"], ...] = (
        "blank",
        "patchmask",
    )
    batch: int = 256
    """Rows answered at once."""
    score_batch: int = 64
    """Rows scored at once."""


@dataclass(frozen=True)
class Run:
    """Trains and measures every variant with every seed."""

    target: Literal["demo", "demo-gemma4"] = "demo"
    folder: Path = Path("runs/mmflash_vs_dflash")
    """Where `prepare` wrote."""
    variants: tuple[Name, ...] = ("dflash", "mmflash")
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 1500
    batch: int = 64
    """Rows of a step."""
    eval_batch: int = 256
    """Rows decoded at once."""
    report: Path | None = None
    """File for the records. Default: a name in the folder that says what it holds."""


@dataclass(frozen=True)
class Report:
    """Joins the records of all runs: JSON, a table and a plot."""

    folder: Path = Path("runs/mmflash_vs_dflash")
    output: Path = Path("benchmarks/results/mmflash_vs_dflash.json")
    """The table and the plot lie beside it, as .md and .png."""
    commit: str | None = None
    """Commit that was run. Default: what git says."""


@dataclass(frozen=True)
class Prepared:
    """What all runs share. rows: with weights of 1; sample: of which prompt each is made.

    scores: by ablation, of every prompt's answer.
    """

    config: TrainConfig
    rows: list[Row]
    sample: list[int]
    prompt_len: list[int]
    answers: list[tuple[int, ...]]
    scores: dict[str, list[Scores | None]]
    held_out: HeldOut


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    keep_compiled_programs()
    tyro.extras.subcommand_cli_from_dict(
        {"prepare": prepare, "run": run, "report": join}, description=__doc__
    )


def path_of(folder: Path, target: str) -> Path:
    return folder / target / "prepared.pickle"


@dataclass(frozen=True)
class Loaded:
    """A target in one dtype, and a draft configuration that fits it."""

    plain: Plan
    params: Any
    encoder: PromptEncoder

    @classmethod
    def of(cls, name: str, dtype: str) -> "Loaded":
        folder, _ = pair(name, "none")
        target, params = load_target(folder, dtype)
        encoder = PromptEncoder.from_checkpoint(folder, target)
        stops = stop_ids(folder, encoder.eos_id)
        return cls(Plan(target, NoDraft(), stops, encoder.vocabulary), params, encoder)

    def drafted(self, config: TrainConfig) -> Plan:
        target = self.plain.target
        assert isinstance(config.draft, DraftShape)
        shape = draft_config(config.draft, target, self.encoder)
        return dataclasses.replace(self.plain, drafter=DFlash(shape, target.dtype))


def prepare(arguments: tyro.conf.OmitArgPrefixes[Prepare]) -> None:
    """Let the target answer the prompts and score the answers, once for all runs."""
    began = time.perf_counter()
    path = path_of(arguments.folder, arguments.target)
    path.parent.mkdir(parents=True, exist_ok=True)
    config = read_yaml(find_config(CONFIGS[arguments.target]), TrainConfig)
    config = dataclasses.replace(
        config,
        output=path.parent,
        data=dataclasses.replace(config.data, count=arguments.count),
        generate=dataclasses.replace(config.generate, batch=arguments.batch),
        eval_prompts=arguments.held_out,
    )
    there = Loaded.of(arguments.target, default_dtype())
    learn, kept = prompt_requests(config.data, config.generate.max_tokens, config.eval_prompts)
    place = places_of(config.data, learn + kept)
    media: list[np.ndarray] = []

    def see(part: list[Prompt]) -> None:
        media.extend(media_features(there.plain, there.params, part))

    prompts = Prompts(there.encoder, learn, place, see)
    answers = answers_of(there.plain, there.params, prompts, config)
    seconds = {"answers": time.perf_counter() - began}
    scores = {}
    for ablation in arguments.ablations:
        settings = VisualConfig(ablation=ablation, batch=arguments.score_batch)
        scores[ablation] = score_all(
            there.plain, there.params, learn, prompts, answers, there.encoder, settings
        )
    seconds["scores"] = time.perf_counter() - began
    rows, sample = [], []
    for index, (prompt, features, answer) in enumerate(zip(prompts, media, answers, strict=True)):
        row = make_row(prompt, features, answer, config.row_length)
        if row is not None:
            rows.append(row)
            sample.append(index)
    exact = Loaded.of(arguments.target, "float32")
    held_out = answer_held_out(
        exact.plain, exact.params,
        Prompts(exact.encoder, kept, lambda index: place(len(learn) + index)),
        exact.encoder, VisualConfig(batch=arguments.score_batch), arguments.batch,
    )  # fmt: skip
    # Pixels and all, so that runs need not draw them again.
    held_out = dataclasses.replace(held_out, prompts=held_out.prompts[:])
    lengths = [len(prompt.ids) for prompt in prompts]
    prepared = Prepared(config, rows, sample, lengths, list(answers), scores, held_out)
    path.write_bytes(pickle.dumps(prepared))
    seconds["all"] = time.perf_counter() - began
    print(f"{path}: {len(rows)} rows, seconds {seconds}")


def run(arguments: tyro.conf.OmitArgPrefixes[Run]) -> None:
    """Train and measure every variant with every seed."""
    began = time.perf_counter()
    prepared: Prepared = pickle.loads(path_of(arguments.folder, arguments.target).read_bytes())
    config = dataclasses.replace(
        prepared.config,
        optimiser=dataclasses.replace(
            prepared.config.optimiser, steps=arguments.steps, batch=arguments.batch
        ),
    )
    variants = {name: VARIANTS[name] for name in arguments.variants}
    lockstep = Lockstep.of(prepared, config, list(variants.values()))
    exact = Loaded.of(arguments.target, "float32")
    plan = exact.drafted(config)
    print(f"ready after {time.perf_counter() - began:.1f} s")
    records: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        start = time.perf_counter()
        made, metrics = lockstep.train(seed)
        trained_s = time.perf_counter() - start
        for index, (name, settings) in enumerate(variants.items()):
            start = time.perf_counter()
            draft = as_shipped(jax.tree.map(lambda x, i=index: x[i], made), "float32")
            params = {"target": exact.params, "drafter": draft}
            figures = evaluate(plan, params, prepared.held_out, arguments.eval_batch)
            records.append(
                {
                    "target": arguments.target,
                    "method": "dflash" if settings.strength == 0 else "mmflash",
                    "variant": name,
                    "lambda": settings.strength,
                    "ablation": settings.ablation,
                    "gate": settings.gate,
                    "weighting": settings.weighting,
                    "seed": seed,
                    "steps": arguments.steps,
                    "batch": arguments.batch,
                    "training_prompts": len(prepared.answers),
                    "weight_share_of_top": lockstep.share_of_top(index),
                    **figures,
                    "train": {key: float(metrics[key][index]) for key in METRICS},
                    "dtype": {"train": lockstep.recipe.plan.target.dtype, "evaluation": "float32"},
                    "train_all_variants_s": trained_s,
                    "evaluate_s": time.perf_counter() - start,
                    "device": report.describe_device(),
                    "versions": report.versions(),
                }
            )
            print(f"seed {seed} {name}: tau {figures['tau']:.3f}, parity {figures['parity']}")
        # After every seed: what is done is safe.
        path = arguments.report or arguments.folder / _file_name(arguments)
        path.write_text(json.dumps(records, indent=2) + "\n")
    print(f"done after {time.perf_counter() - began:.1f} s")


def _file_name(arguments: Run) -> str:
    seeds = "-".join(map(str, arguments.seeds))
    variants = "-".join(arguments.variants)
    return f"records_{arguments.target}_{arguments.steps}_{seeds}_{variants}.json"


def join(arguments: tyro.conf.OmitArgPrefixes[Report]) -> None:
    """Join the records of all runs: JSON, a table and a plot."""
    files = sorted(arguments.folder.glob("records_*.json"))
    records = [record for file in files for record in json.loads(file.read_text())]
    commit = (
        arguments.commit
        or subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    records = mmflash_report.join([{**record, "commit": commit} for record in records])
    arguments.output.write_text(json.dumps(records, indent=2) + "\n")
    table = mmflash_report.table(records)
    arguments.output.with_suffix(".md").write_text(table)
    mmflash_report.plot(records, arguments.output.with_suffix(".png"))
    print(table)


@dataclass(frozen=True)
class Lockstep:
    """Training runs that differ in token weights alone, all variants of a seed at once.

    data: every row, padded, on the device; `media` is `[N, M, D]`, each row's own.
    weight: fp32 `[V, N, S]`, of each variant. score: nats `[N, S]`, NaN where there is none.
    """

    recipe: Recipe
    config: TrainConfig
    target_params: Any
    data: dict[str, jax.Array]
    weight: jax.Array
    score: np.ndarray

    @classmethod
    def of(
        cls, prepared: Prepared, config: TrainConfig, variants: Sequence[VisualConfig]
    ) -> "Lockstep":
        there = Loaded.of(config.target, default_dtype())
        recipe = Recipe(
            there.drafted(config), make_optimiser(config.optimiser), config.objective,
            config.optimiser.accumulate,
        )  # fmt: skip
        batch = collate_apart(prepared.rows, config.row_length)
        image_id = there.plain.target.config.image_token_id
        weights = [_weighted(prepared, settings, image_id) for settings in variants]
        return cls(
            recipe, config, there.params, jax.device_put(batch), jnp.asarray(np.stack(weights)),
            _scores(prepared),
        )  # fmt: skip

    def train(self, seed: int) -> tuple[Any, dict[str, np.ndarray]]:
        """Parameters of every variant, `[V, ...]`, and the metrics of the last step."""
        settings = self.config.optimiser
        drafter = self.recipe.plan.drafter
        assert isinstance(drafter, DFlash)
        state = make_state(self.recipe, DFlash(drafter.config, "float32").init_params(seed))
        count = self.weight.shape[0]
        states = jax.tree.map(lambda x: jnp.repeat(x[None], count, axis=0), state)
        rows = settings.batch * settings.accumulate
        order = _order(self.data["ids"].shape[0], rows, seed)
        metrics: dict[str, Any] = {}
        for start in tqdm(range(0, settings.steps, STEPS_AT_ONCE), desc=f"train, seed {seed}"):
            chosen = [next(order) for _ in range(min(STEPS_AT_ONCE, settings.steps - start))]
            states, metrics = some_steps(
                self.recipe, self.target_params, states, self.data, self.weight,
                np.stack(chosen), seed,
            )  # fmt: skip
        bad = np.asarray(states.bad_step)
        if bad.any():
            raise FloatingPointError(f"loss or gradient is not finite: first bad steps {bad}")
        return states.params, {name: np.asarray(value) for name, value in metrics.items()}

    def share_of_top(self, index: int) -> float | None:
        """Share of variant `index`'s weight on the top bucket of training tokens."""
        return share_of_top(self.score, np.asarray(self.weight[index]))


def _order(count: int, batch: int, seed: int) -> Any:
    """Which rows each step takes: the order of `training.feed`."""
    order = grain.MapDataset.source(list(range(count))).seed(seed).shuffle().repeat()
    return iter(order.batch(batch).map(np.asarray).to_iter_dataset())


def collate_apart(rows: Sequence[Row], width: int) -> Batch:
    """All rows as one batch, but the image features of each row apart: `media` `[N, M, D]`."""
    batch = collate(rows, width)
    most = max(len(row.media) for row in rows)
    apart = np.zeros((len(rows), most, rows[0].media.shape[1]), rows[0].media.dtype)
    media_idx = np.full((len(rows), width), -1, np.int32)
    for index, row in enumerate(rows):
        apart[index, : len(row.media)] = row.media
        media_idx[index, : len(row.ids)] = row.media_idx
    positions = np.moveaxis(batch["positions"], 1, 0)
    return batch | {"media": apart, "media_idx": media_idx, "positions": positions}


def _weighted(prepared: Prepared, settings: VisualConfig, image_id: int) -> np.ndarray:
    """Token weights `[N, S]` of all rows, as the trainer's `make_row` lays them out."""
    scores = prepared.scores[settings.ablation]
    width = prepared.config.row_length
    weight = np.zeros((len(prepared.rows), width), np.float32)
    for index, (row, sample) in enumerate(zip(prepared.rows, prepared.sample, strict=True)):
        answer, begins = prepared.answers[sample], prepared.prompt_len[sample]
        made = weights_of(answer, scores[sample], width - begins, image_id, settings)
        weight[index, :begins] = 1.0
        weight[index, begins : len(row.ids)] = made.weight[: width - begins]
    return weight


def _scores(prepared: Prepared) -> np.ndarray:
    """Blank-image scores `[N, S]` of tokens that can be a label, NaN elsewhere."""
    width = prepared.config.row_length
    score = np.full((len(prepared.rows), width), np.nan, np.float32)
    for index, sample in enumerate(prepared.sample):
        known, begins = prepared.scores["blank"][sample], prepared.prompt_len[sample]
        if known is not None:
            part = known[0][1 : width - begins]
            score[index, begins + 1 : begins + 1 + len(part)] = part
    return score


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def some_steps(
    recipe: Recipe,
    target_params: Any,
    states: TrainState,
    data: dict[str, jax.Array],
    weight: jax.Array,
    chosen: jax.Array,
    seed: jax.Array | int,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """`train_step` of every variant on the rows `chosen` `[steps, B]`; metrics of the last."""

    def one(states: TrainState, rows: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        batch = {name: value[rows] for name, value in data.items() if name != "weight"}
        media = batch["media"]
        offset = jnp.arange(media.shape[0])[:, None] * media.shape[1]
        batch["media_idx"] = jnp.where(batch["media_idx"] < 0, -1, batch["media_idx"] + offset)
        batch["media"] = media.reshape(-1, media.shape[-1])
        batch["positions"] = jnp.moveaxis(batch["positions"], 1, 0)

        def of_variant(
            state: TrainState, weight: jax.Array
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            return train_step(recipe, target_params, state, {**batch, "weight": weight}, seed)

        return jax.vmap(of_variant)(states, weight[:, rows])

    states, metrics = jax.lax.scan(one, states, chosen)
    return states, jax.tree.map(lambda x: x[-1], metrics)


if __name__ == "__main__":
    main()
