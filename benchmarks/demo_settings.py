"""What the demo's tables compare, with which settings, and where it lies in a folder."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.methods import DEPTH, TOP_K
from mmflash_jax.config_files import as_values, find_config, read_yaml
from mmflash_jax.config_train import TrainConfig, VisualConfig
from mmflash_jax.engine.journal import Journal
from mmflash_jax.evaluation.evaluate_config import EvaluateConfig

Target = Literal["demo", "demo-gemma4"]
CONFIGS = {
    "demo": {
        "dflash": "demo_qwen35.yaml",
        "mtp": "demo_qwen35_mtp.yaml",
        "eagle3": "demo_qwen35_eagle3.yaml",
    },
    # Gemma's assistant is not trained by this project.
    "demo-gemma4": {"dflash": "demo_gemma4.yaml", "eagle3": "demo_gemma4_eagle3.yaml"},
}
"""By target and kind of draft."""
DRAFTS = {
    "dflash": {"dflash": VisualConfig(strength=0.0), "mmflash": VisualConfig()},
    "mtp": {"mtp": VisualConfig(strength=0.0)},
    "eagle3": {"eagle3": VisualConfig(strength=0.0)},
}
"""By kind, the drafts that one run trains in lockstep, and their token weights."""
METHODS = {
    "mtp3": ("mtp", "mtp", "draft_tokens=3"),
    "mtp7": ("mtp", "mtp", "draft_tokens=7"),
    "eagle3": ("eagle3", "eagle3", "draft_tokens=3"),
    "eagle3-tree16": (
        "eagle3", "eagle3", f"draft_tokens=15,draft_top_k={TOP_K},draft_depth={DEPTH}"
    ),
    "dflash": ("dflash", "dflash", ""),
    "mmflash": ("dflash", "mmflash", ""),
}  # fmt: skip
"""Kind, draft and settings of a method; methods of one draft decode with the same weights."""
XLA_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""Unless XLA_FLAGS are set: trying kernels would take most of the time at the demo's sizes."""


@dataclass(frozen=True)
class Settings:
    """What all records of a folder share."""

    count: int = 4000
    """Training prompts."""
    steps: int = 1500
    """Updates of each draft."""
    batch: int = 32
    """Rows of a step."""
    questions: int = 64
    """Held-out charts that are asked."""
    max_tokens: int = 160
    """Most tokens of an answer to them."""
    concurrency: tuple[int, ...] = (1, 8, 32)
    """Requests in flight."""
    repeats: int = 1
    """Timed passes over the questions, for every seed."""


def xla_flags() -> str:
    return os.environ.get("XLA_FLAGS", XLA_FLAGS)


def keep_settings(folder: Path, settings: Settings) -> None:
    """Write the settings of a new folder.

    Raises:
        ConfigError: the folder has others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header = as_values(settings) | {"xla_flags": xla_flags()}
    journal = Journal(folder / "settings.json", header, "make everything in the folder anew")
    journal.read()
    with journal.append(keep=0):
        pass


def settings_of(folder: Path) -> tuple[Settings, str]:
    """Settings of a folder and its XLA_FLAGS."""
    values = json.loads((folder / "settings.json").read_text())
    flags = values.pop("xla_flags")
    return Settings(**values | {"concurrency": tuple(values["concurrency"])}), flags


def prepared_path(folder: Path, target: str) -> Path:
    return folder / target / "prepared.pickle"


def compiled_path(folder: Path, target: str, method: str) -> Path:
    """Is there once the programs of a method are compiled."""
    return untrained_path(folder, target, method).with_suffix(".compiled")


def untrained_path(folder: Path, target: str, method: str) -> Path:
    """Draft with which a method's programs are compiled."""
    return folder / target / "untrained" / method


def draft_path(folder: Path, target: str, draft: str, seed: int) -> Path:
    return folder / target / "drafts" / f"{draft}-{seed}"


def methods_of(target: str) -> list[str]:
    """Methods with a draft that can be trained for the target."""
    return [method for method, (kind, *_) in METHODS.items() if kind in CONFIGS[target]]


def compiled_methods(target: str) -> list[str]:
    """Those whose programs differ: another token weight is no other program."""
    return ["none", *(method for method in methods_of(target) if method != "mmflash")]


def train_config(folder: Path, target: str, kind: str) -> TrainConfig:
    """The shipped config of the kind, with the folder's settings."""
    settings, _ = settings_of(folder)
    config = read_yaml(find_config(CONFIGS[target][kind]), TrainConfig)
    return dataclasses.replace(
        config,
        output=prepared_path(folder, target).parent,
        data=dataclasses.replace(config.data, count=settings.count),
        optimiser=dataclasses.replace(config.optimiser, steps=settings.steps, batch=settings.batch),
        eval_prompts=0,
    )


def evaluate_config(
    folder: Path, target: str, drafts: dict[str, Path], output: Path
) -> EvaluateConfig:
    """drafts: the folder of each method's draft."""
    settings, _ = settings_of(folder)
    methods = [
        ",".join(filter(None, (f"{method}={path}", METHODS[method][2])))
        for method, path in drafts.items()
    ]
    return EvaluateConfig(
        target=target, methods=tuple(methods), concurrency=settings.concurrency,
        questions=settings.questions, max_tokens=settings.max_tokens, repeats=settings.repeats,
        output=output,
    )  # fmt: skip
