"""Answer prompts in batches: `python serve.py --target demo` (all options: `--help`)."""

import logging
import os
import sys
from pathlib import Path

import jax
import tyro

from mmflash_jax.config import ServeConfig
from mmflash_jax.drafters import FitError
from mmflash_jax.evaluation.batch import run
from mmflash_jax.registry import CheckpointNotFoundError
from mmflash_jax.weights import WeightsError
from mmflash_jax.weights.hf_config import ConfigError

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mmflash-jax"


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    # Compiled programs are kept, so that a second start is quick.
    jax.config.update("jax_compilation_cache_dir", str(CACHE / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    try:
        config = tyro.cli(ServeConfig, description=__doc__)
        return run(config)
    except (CheckpointNotFoundError, ConfigError, FitError, WeightsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
