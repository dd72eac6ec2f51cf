"""Random drafts that draft token after token: an MTP head, or an assistant, by the target."""

import json
import shutil
from pathlib import Path
from typing import Any

from mmflash_jax.layers.schema import Params
from mmflash_jax.load import load_drafter
from mmflash_jax.targets import Target
from tests.drafters import assistant, mtp


def chain_for(
    target: Target, model: Any, source: Path, folder: Path, draft_tokens: int
) -> tuple[Any, Params, Any]:
    """Plan and parameters of a random draft for the target in `source`, and the torch model.

    It is written to `folder` and loaded from there.
    """
    config = json.loads((source / "config.json").read_text())
    if config["model_type"] == "gemma4":
        made = assistant.tiny_assistant(folder, config["text_config"])
    else:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        made = mtp.add_head(folder, model.config.text_config)
    return *load_drafter(folder, target, "float32", draft_tokens=draft_tokens), made
