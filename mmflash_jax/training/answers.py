"""The target's own answers to the training prompts, kept in a file beside the run.

A draft must foresee what its target really says, so it learns from nothing else.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mmflash_jax.config import JsonlData, TrainConfig
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.engine.offline import answer
from mmflash_jax.layers.schema import Params
from mmflash_jax.weights.hf_config import ConfigError

log = logging.getLogger(__name__)


def answers_of(
    plan: Plan, target_params: Params, prompts: Sequence[Prompt], config: TrainConfig
) -> list[tuple[int, ...]]:
    """Greedy answers, read from `answers.jsonl` when that was made with the same settings.

    Raises:
        ConfigError: the file was made with other settings; it is left alone.
    """
    path = config.output / "answers.jsonl"
    header = _header(config)
    if path.exists():
        return _read(path, header, len(prompts))
    params = {"target": target_params, "drafter": {}}
    with tqdm(total=len(prompts), desc="answer", unit="prompt") as bar:
        made = answer(plan, params, prompts, batch=config.generate.batch, on_progress=bar.update)
    ids = [completion.token_ids for completion in made.completions]
    part = path.with_suffix(".tmp")
    with part.open("w") as stream:
        for line in (header, *ids):
            stream.write(json.dumps(line) + "\n")
    # A file that exists is whole.
    part.rename(path)
    return ids


def _header(config: TrainConfig) -> dict[str, Any]:
    data = {k: str(v) for k, v in dataclasses.asdict(config.data).items()}
    if isinstance(config.data, JsonlData):
        # The same path may hold other prompts by now.
        data["sha256"] = hashlib.sha256(config.data.path.read_bytes()).hexdigest()
    return {
        "target": config.target,
        "data": data,
        "max_tokens": config.generate.max_tokens,
        "sampling": "greedy",
    }


def _read(path: Path, header: dict[str, Any], count: int) -> list[tuple[int, ...]]:
    first, *rest = path.read_text().splitlines()
    stored = json.loads(first)
    different = [name for name in header if stored.get(name) != header[name]]
    if different or len(rest) != count:
        name = different[0] if different else "number of answers"
        values = (stored.get(name), header[name]) if different else (len(rest), count)
        raise ConfigError(
            f"{path} was made with other settings: {name} is {values[0]!r} there and "
            f"{values[1]!r} in the config; remove the file to answer anew"
        )
    log.info("%d answers read from %s", count, path)
    return [tuple(json.loads(line)) for line in rest]
