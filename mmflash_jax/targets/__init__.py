"""Target families by the architecture name that `config.json` gives."""

from mmflash_jax.targets.base import Target, TargetOutput
from mmflash_jax.targets.gemma4 import Gemma4
from mmflash_jax.targets.qwen3_5 import Qwen35

TARGETS = {
    "Gemma4ForConditionalGeneration": Gemma4,
    "Qwen3_5ForConditionalGeneration": Qwen35,
}

__all__ = ["TARGETS", "Target", "TargetOutput"]
