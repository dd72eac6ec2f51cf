"""Settings of `python -m mmflash_jax.evaluation`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmflash_jax.config import Dtype, Kernels
from mmflash_jax.weights.hf_config import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Acceptance, speed, parity and accuracy of draft methods on benchmarks."""

    target: str = "demo"
    """Short name, local folder or hub id of the target."""
    methods: tuple[str, ...] = ()
    """Drafts as serve.py takes them, or LABEL=DRAFT; settings of one follow after commas, as in
    scaled=DIR,draft_embedding_scale=16. "own" is the draft that the target's short name brings, and
    the default. Plain decoding ("none") always runs with them."""
    benchmarks: tuple[str, ...] = ("charts",)
    """NAME=FOLDER of local copies of ChartQA, CharXiv, MMStar, MMBench, DynaMath, MathVista and
    MathVerse; and charts, the demo's held-out ones, which need no folder."""
    concurrency: tuple[int, ...] = (1, 8, 32)
    """Requests in flight."""
    questions: int = 64
    """Questions of each benchmark, drawn by `seed`; all if it has fewer."""
    style: Literal["reason", "direct"] = "reason"
    """reason: think step by step, then answer; direct: the answer alone, for accuracy only."""
    max_tokens: int = 512
    """Most tokens of an answer."""
    max_length: int = 8192
    """Most tokens of a row in the cache, prompt included."""
    repeats: int = 3
    """Passes over the questions; speeds are their median. Methods take turns."""
    seed: int = 0
    """Of the draw of questions."""
    dtype: Dtype = "auto"
    """Dtype of weights and activations; auto is bfloat16 on accelerators, float32 on a CPU."""
    kernels: Kernels = "auto"
    """Implementation of attention, recurrence and what lies between products, as for serve.py."""
    thinking: bool | None = None
    """Let the model reason before it answers, or not. Default: what its chat template does."""
    output: Path = Path("runs/evaluation")
    """Folder for records.jsonl, tables and plots. What it has is kept and not measured again."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning.

        Raises:
            ConfigError: naming the field and its value.
        """
        for name in ("questions", "max_tokens", "max_length", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        if not self.concurrency or min(self.concurrency) < 1:
            raise ConfigError(f"concurrency is {self.concurrency}, expected numbers from 1 up")
