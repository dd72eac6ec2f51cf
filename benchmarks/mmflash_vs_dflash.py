"""DFlash against MMFlash on a demo target: same data, steps and compute, several seeds.

    python -m benchmarks.mmflash_vs_dflash prepare --target demo --folder runs/compare
    python -m benchmarks.mmflash_vs_dflash run --target demo --folder runs/compare --seeds 0 1 2
    python -m benchmarks.mmflash_vs_dflash report --folder runs/compare

`prepare` lets the target answer the prompts and scores the answers, once for all runs. `run` trains
one draft for each variant and seed and measures it on held-out charts, greedily, in fp32, where
drafted ids equal plain ones. Any number of `run` may work side by side, for other targets, seeds,
steps or variants; each writes a file of its own, which `report` joins.

The variants of a seed are trained in lockstep (`benchmarks.lockstep`): the same batches, anchors
and initial draft. Nothing but token weights differs.
"""

import dataclasses
import json
import logging
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

from benchmarks import mmflash_report
from benchmarks.lockstep import Lockstep
from benchmarks.prepared import Loaded, Prepared, prepare_rows
from mmflash_jax.compilation import keep_compiled_programs
from mmflash_jax.config_files import find_config, read_yaml
from mmflash_jax.config_train import TrainConfig, VisualConfig
from mmflash_jax.evaluation import report
from mmflash_jax.evaluation.records import commit as commit_here
from mmflash_jax.load import default_dtype
from mmflash_jax.training.export import as_shipped
from mmflash_jax.training.held_out import HeldOut, answer_held_out, evaluate
from mmflash_jax.training.prompts import Prompts, places_of
from mmflash_jax.training.step import METRICS

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


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    keep_compiled_programs()
    tyro.extras.subcommand_cli_from_dict(
        {"prepare": prepare, "run": run, "report": join}, description=__doc__
    )


def path_of(folder: Path, target: str) -> Path:
    return folder / target / "prepared.pickle"


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
    prepared, kept = prepare_rows(there, config, arguments.ablations, arguments.score_batch)
    seconds = {"rows": time.perf_counter() - began}
    exact = Loaded.of(arguments.target, "float32")
    held_out = answer_held_out(
        exact.plain, exact.params,
        Prompts(exact.encoder, kept, places_of(config.data, kept)),
        exact.encoder, VisualConfig(batch=arguments.score_batch), arguments.batch,
    )  # fmt: skip
    # Pixels and all, so that runs need not draw them again.
    held_out = dataclasses.replace(held_out, prompts=held_out.prompts[:])
    path.with_name("held_out.pickle").write_bytes(pickle.dumps(held_out))
    prepared.write(path)
    seconds["all"] = time.perf_counter() - began
    print(f"{path}: {len(prepared.rows)} rows, seconds {seconds}")


def run(arguments: tyro.conf.OmitArgPrefixes[Run]) -> None:
    """Train and measure every variant with every seed."""
    began = time.perf_counter()
    source = path_of(arguments.folder, arguments.target)
    prepared = Prepared.read(source)
    held_out: HeldOut = pickle.loads(source.with_name("held_out.pickle").read_bytes())
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
            figures = evaluate(plan, params, held_out, arguments.eval_batch)
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
    commit = arguments.commit or commit_here()
    records = mmflash_report.join([{**record, "commit": commit} for record in records])
    arguments.output.write_text(json.dumps(records, indent=2) + "\n")
    table = mmflash_report.table(records)
    arguments.output.with_suffix(".md").write_text(table)
    mmflash_report.plot(records, arguments.output.with_suffix(".png"))
    print(table)


if __name__ == "__main__":
    main()
