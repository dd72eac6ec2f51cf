"""The families by name."""

import json
from pathlib import Path
from typing import Any

from mmflash_jax.demo.recipe.family import Family
from mmflash_jax.demo.recipe.gemma4 import GEMMA4
from mmflash_jax.demo.recipe.qwen35 import QWEN35

FAMILIES: dict[str, Family[Any]] = {family.name: family for family in (QWEN35, GEMMA4)}
_BY_MODEL_TYPE = {"qwen3_5": QWEN35, "gemma4": GEMMA4}


def family_of(folder: Path) -> Family[Any]:
    """The family of a model folder, by its configuration."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    if model_type not in _BY_MODEL_TYPE:
        raise ValueError(f"{folder}: model_type {model_type!r} is not one of {[*_BY_MODEL_TYPE]}")
    return _BY_MODEL_TYPE[model_type]
