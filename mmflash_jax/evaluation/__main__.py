"""Measure draft methods on benchmarks and print the tables of the published model cards:

    python -m mmflash_jax.evaluation --target qwen35-4b --benchmarks ChartQA=data/ChartQA charts

See docs/evaluation.md. Files come to --output; a run that was killed goes on there.
"""

import logging
import os
import sys

import tyro

from mmflash_jax.evaluation.evaluate_config import EvaluateConfig


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    config = tyro.cli(EvaluateConfig, description=__doc__, prog="python -m mmflash_jax.evaluation")
    # As in serve.py: no advice about PyTorch, and --help answers at once.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from mmflash_jax.compilation import keep_compiled_programs
    from mmflash_jax.evaluation.harness import evaluate
    from mmflash_jax.evaluation.tables import write_all

    keep_compiled_programs()
    try:
        records, failed = evaluate(config)
        if records:
            sys.stdout.write(write_all(records, config.output))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
