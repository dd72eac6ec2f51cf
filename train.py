"""Train a draft: `python train.py --config demo_qwen35.yaml` (looked up in configs/)."""

import json
import logging
import os
import sys
from dataclasses import dataclass

import tyro

from mmflash_jax.config import TrainConfig, find_config, read_yaml


@dataclass(frozen=True)
class Arguments:
    """Train a draft for a frozen target."""

    config: str
    """A YAML file, or the bare name of one in configs/."""


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    arguments = tyro.cli(Arguments, description=__doc__)
    # Tokenizers and image processors need no PyTorch, whose absence transformers would announce.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        config = read_yaml(find_config(arguments.config), TrainConfig)
        # Imported after the config is read, so that a wrong one is refused at once.
        from mmflash_jax.compilation import keep_compiled_programs
        from mmflash_jax.training.trainer import train

        keep_compiled_programs()
        figures = train(config)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures, indent=2))
    return 0 if figures.get("parity", True) else 1


if __name__ == "__main__":
    sys.exit(main())
