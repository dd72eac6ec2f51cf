"""Answer prompts in batches: `python serve.py --target demo`; with `--port 8000` serve them over
HTTP (all options: `--help`)."""

import logging
import os
import sys

import tyro

from mmflash_jax.config import ServeConfig


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    config = tyro.cli(ServeConfig, description=__doc__)
    # Tokenizers and image processors need no PyTorch, whose absence transformers would announce.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Imported after the flags are read, so that --help and a wrong flag answer at once.
    from mmflash_jax.compilation import keep_compiled_programs
    from mmflash_jax.evaluation.batch import run

    keep_compiled_programs()
    try:
        if config.port is not None:
            from mmflash_jax.server.start import serve

            return serve(config, config.port)
        return run(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
