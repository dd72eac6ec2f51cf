"""Train a draft: `python train.py --config demo_qwen35.yaml` (looked up in configs/)."""

import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from mmflash_jax.config_files import find_config, read_yaml
from mmflash_jax.config_train import TrainConfig


@dataclass(frozen=True)
class Arguments:
    """Train a draft for a frozen target, or go on with a run that was stopped.

    Every setting of the config can be given as a flag too and overrides the file:
    `--optimiser.steps 100 --output runs/x`. `--config FILE --help` lists them all.
    """

    config: str
    """A YAML file, or the bare name of one in configs/."""
    fresh: bool = False
    """Start anew: remove the run's checkpoints and metrics. Answers of the target stay."""
    export: Path | None = None
    """Do not train: export the run's newest checkpoint to this folder."""
    layout: Literal["zlab", "speculators"] = "zlab"
    """Layout of the export; SGLang and vLLM read z-lab's."""


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    # Tokenizers and image processors need no PyTorch, whose absence transformers would announce.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        arguments, flags = read_arguments(sys.argv[1:])
        config = read_yaml(find_config(arguments.config), TrainConfig, flags)
        # Imported after the config is read, so that a wrong one is refused at once.
        from mmflash_jax.compilation import keep_compiled_programs
        from mmflash_jax.training.export import export_run
        from mmflash_jax.training.loop import Stopped
        from mmflash_jax.training.processes import start_processes
        from mmflash_jax.training.trainer import train

        keep_compiled_programs()
        if arguments.export is not None:
            export_run(config.output, arguments.export, layout=arguments.layout)
            return 0
        start_processes()
        try:
            figures = train(config, fresh=arguments.fresh)
        except Stopped as stopped:
            print(f"{stopped}; the same command goes on from there", file=sys.stderr)
            # A scheduler that wants its machine back sees a clean exit, a script sees Ctrl-C.
            return 0 if stopped.signal == signal.SIGTERM else 128 + stopped.signal
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures, indent=2))
    return 0 if figures.get("parity", True) else 1


def read_arguments(given: list[str]) -> tuple[Arguments, list[str]]:
    """The script's own arguments and those that override settings; `--help` ends the program."""
    asked = {"-h", "--help"} & set(given)
    named = any(word.split("=")[0] == "--config" for word in given)
    if asked and not named:
        tyro.cli(Arguments, args=["--help"])
    rest = [word for word in given if word not in asked]
    arguments, flags = tyro.cli(Arguments, args=rest, return_unknown_args=True)
    if asked:
        config = read_yaml(find_config(arguments.config), TrainConfig, flags)
        tyro.cli(
            tyro.conf.AvoidSubcommands[TrainConfig], args=["--help"], default=config,
            description=f"Settings of {arguments.config}, each of which is a flag.",
        )  # fmt: skip
    return arguments, flags


if __name__ == "__main__":
    sys.exit(main())
