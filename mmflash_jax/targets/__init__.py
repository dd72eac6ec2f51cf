"""Target families by the architecture name that `config.json` gives."""

from mmflash_jax.targets.base import Target, TargetOutput
from mmflash_jax.targets.qwen3_5 import Qwen35

TARGETS = {"Qwen3_5ForConditionalGeneration": Qwen35}

__all__ = ["TARGETS", "Target", "TargetOutput"]
