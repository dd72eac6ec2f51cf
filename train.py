"""Train a draft: `python train.py --config demo_qwen35.yaml` (looked up in configs/)."""

import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro

from mmflash_jax.config import TrainConfig, find_config, read_yaml
from mmflash_jax.registry import CheckpointNotFoundError
from mmflash_jax.training.trainer import train
from mmflash_jax.weights import WeightsError
from mmflash_jax.weights.hf_config import ConfigError

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mmflash-jax"


@dataclass(frozen=True)
class Arguments:
    """Train a draft for a frozen target."""

    config: str
    """A YAML file, or the bare name of one in configs/."""


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    jax.config.update("jax_compilation_cache_dir", str(CACHE / "xla"))
    try:
        arguments = tyro.cli(Arguments, description=__doc__)
        figures = train(read_yaml(find_config(arguments.config), TrainConfig))
    except (CheckpointNotFoundError, ConfigError, WeightsError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
