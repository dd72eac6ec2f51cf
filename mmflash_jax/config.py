"""Settings of answering and serving, and what those of training share with them.

Model architecture is not among them: it comes from checkpoints.

Order of precedence: defaults here < the YAML file < command-line flags.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmflash_jax.weights.hf_config import ConfigError

Dtype = Literal["auto", "float32", "bfloat16"]
FileKind = Literal["jsonl", "parquet"]
# As `pallas_kernels.Kernels`, whose import would bring jax: a wrong flag should answer at once.
Kernels = Literal["auto", "reference", "gpu", "interpret"]


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How the tokens of a request are chosen. At temperature 0 nothing else matters.

    The filters apply in the order of vLLM: temperature, min_p, top_k, top_p.
    """

    temperature: float = 0.0
    """0 is greedy. Holds, as the other four, for prompts that name none."""
    top_k: int = 0
    """Most likely tokens to sample from, 0 for all."""
    top_p: float = 1.0
    """Mass of the most likely tokens to sample from."""
    min_p: float = 0.0
    """Least probability of a sampled token, as a share of the largest."""
    seed: int = 0
    """Of the noise; equal seeds draw alike. Each line of a prompt file gets its own from it."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning.

        Raises:
            ConfigError: naming the field, its value and the range.
        """
        ranges = {
            "temperature": (0.0 <= self.temperature <= 100.0, "from 0 to 100"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0, up to 1"),
            "min_p": (0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            "seed": (0 <= self.seed < 2**64, "from 0 to 2^64 - 1"),
        }
        for name, (holds, allowed) in ranges.items():
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be {allowed}")

    @property
    def is_greedy(self) -> bool:
        # One token kept is the most likely one, whatever the temperature.
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def sampling(self) -> "SamplingSettings":
        """These five fields alone, of a config that holds more."""
        fields = dataclasses.fields(SamplingSettings)
        return SamplingSettings(**{f.name: getattr(self, f.name) for f in fields})

    def of_row(self, number: int) -> "SamplingSettings":
        """The same with a seed of its own for row `number`."""
        return dataclasses.replace(self.sampling, seed=((self.seed << 32) + number) % 2**64)


@dataclass(frozen=True)
class ServeConfig(SamplingSettings):
    """Batched generation (answer prompts, compare with plain decoding, report), or with `port` a
    server."""

    target: str = "demo"
    """Short name, local folder or hub id of the target."""
    draft: str | None = None
    """Folder or hub id of the draft, "mtp" for the head that Qwen3.5 checkpoints bring, or "none".
    Default: what the short name brings."""
    draft_tokens: int | None = None
    """Tokens that a step drafts, for drafts that make one after another (MTP, Gemma's assistant,
    EAGLE-3). Default: 3 for MTP, 5 for the assistant; for EAGLE-3 what its checkpoint says or 3,
    and 15 in a tree. DFlash drafts a block of the size that it was trained for."""
    draft_top_k: int | None = None
    """Let EAGLE-3 draft a tree, of which each level runs so many nodes. Default: 1, a chain."""
    draft_depth: int | None = None
    """Levels of that tree. Default: 5."""
    prompts: Path | None = None
    """JSONL or parquet file of prompts. Default: the bundled sample prompts."""
    output: Path | None = None
    """JSONL file for the answers, one line a prompt, in order."""
    report: Path | None = None
    """JSON file for tau, acceptance, speed, parity and accuracy."""
    max_tokens: int = 256
    """Most tokens to generate for a prompt that names no limit of its own."""
    max_length: int = 8192
    """Most tokens of a row in the cache, prompt included."""
    batch: int = 8
    """Rows decoded at once."""
    dtype: Dtype = "auto"
    """Dtype of weights and activations; auto is bfloat16 on accelerators, float32 on a CPU."""
    kernels: Kernels = "auto"
    """Implementation of attention, recurrence and what lies between products. auto: Pallas kernels
    on a single NVIDIA GPU in bfloat16, else reference; gpu: the kernels; reference: plain XLA;
    interpret: the kernels in Pallas' interpreter, slowly."""
    draft_embedding_scale: float | None = None
    """Factor on the token rows that the draft receives. Default: `input_embedding_scale` of the
    draft's config, or 1. Drafts trained on scaled rows that do not say so (some for Gemma) need the
    root of the hidden size here."""
    plain: bool = True
    """Also decode without the draft, for speed and parity."""
    thinking: bool | None = None
    """Let the model reason before it answers, or not. Default: what its chat template does."""
    model_parallel: int = 1
    """Devices over which the target's weights are split; more than one run without kernels."""
    port: int | None = None
    """Serve an OpenAI-compatible API at this port. Default: answer prompts and end."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for all of this machine's."""
    served_name: str | None = None
    """Name of the model for clients. Default: the value of target."""
    api_key: str | None = None
    """Key that clients must send. Default: none."""
    adapt: bool = True
    """Serve each load with as many rows and drafts as pay; takes more programs, compiled at start.
    Off: always all rows and whole blocks."""
    prefill_tokens: int = 2048
    """Prompt tokens prefilled between two runs of the loop. Fewer hold up running answers less,
    more fill free rows sooner."""
    run_ms: float = 80.0
    """Time that the loop decodes before the server looks at what has come in meanwhile, if no row
    ends before; at least 4 and at most 16 steps. Shorter: smoother streams; longer: less is lost
    between two runs."""
    max_queue: int = 64
    """Requests that may wait for a row; more are turned away for now."""
    image_root: Path | None = None
    """Folder whose files clients may name as file:// images. Default: no files."""
    allow_http_images: bool = False
    """Fetch images that clients name by http(s) address, from public addresses only."""
    fetch_seconds: float = 10.0
    """Longest time that fetching one image may take."""
    max_images: int = 8
    """Most images of a request."""
    max_image_mb: float = 20.0
    """Largest file of an image, in MiB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(
            self, "max_tokens", "max_length", "batch", "model_parallel", "draft_embedding_scale",
            "draft_tokens", "draft_top_k", "draft_depth", "prefill_tokens", "run_ms", "max_queue",
            "fetch_seconds", "max_images", "max_image_mb",
        )  # fmt: skip
        if self.port is not None and not 0 <= self.port < 2**16:
            raise ConfigError(f"port is {self.port}, it must be from 0 to 65535")
        if self.image_root is not None and not self.image_root.is_dir():
            raise ConfigError(f"image_root is {self.image_root}, there is no such folder")
        if self.model_parallel > 1:
            why = f"model_parallel is {self.model_parallel}, but a kernel is one device's"
            no_named_kernels(self.kernels, why)


def no_named_kernels(kernels: Kernels, why: str) -> None:
    """
    Raises:
        ConfigError: kernels are asked for by name, where they cannot run.
    """
    if kernels in ("gpu", "interpret"):
        raise ConfigError(f"kernels is {kernels} and {why}; use kernels auto or reference")


def positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name} is {value}, it must be positive")


def not_negative(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 0:
            raise ConfigError(f"{name} is {getattr(config, name)}, it must not be negative")
