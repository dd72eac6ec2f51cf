"""Every user-facing setting. Model architecture is not among them: it comes from checkpoints.

Order of precedence: defaults here < the YAML file < command-line flags.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from mmflash_jax.weights.hf_config import ConfigError

Dtype = Literal["auto", "float32", "bfloat16"]
FileKind = Literal["jsonl", "parquet"]
# As `pallas_kernels.Kernels`, whose import would bring jax: a wrong flag should answer at once.
Kernels = Literal["auto", "reference", "gpu", "interpret"]
Ablation = Literal["blank", "patchmask", "pixelate", "noise", "textonly"]


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
        _positive(
            self, "max_tokens", "max_length", "batch", "model_parallel", "draft_embedding_scale",
            "draft_tokens", "draft_top_k", "draft_depth", "prefill_tokens", "run_ms", "max_queue",
            "fetch_seconds", "max_images", "max_image_mb",
        )  # fmt: skip
        if self.port is not None and not 0 <= self.port < 2**16:
            raise ConfigError(f"port is {self.port}, it must be from 0 to 65535")
        if self.image_root is not None and not self.image_root.is_dir():
            raise ConfigError(f"image_root is {self.image_root}, there is no such folder")
        if self.model_parallel > 1 and self.kernels in ("gpu", "interpret"):
            raise ConfigError(
                f"kernels is {self.kernels} and model_parallel is {self.model_parallel}, but a "
                "kernel is one device's; use kernels auto or reference"
            )


@dataclass(frozen=True)
class DraftShape:
    """Geometry of a new DFlash draft, which is the kind if none is named. Width, vocabulary and
    layer count of the target are the target's."""

    implied: ClassVar[bool] = True

    num_hidden_layers: int
    """Draft layers."""
    intermediate_size: int
    """Width of the MLP."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key/value heads."""
    head_dim: int
    """Width of a head."""
    kind: Literal["dflash"] = "dflash"
    mask_token: str | None = None
    """The target's token that stands in masked slots; its embedding stays frozen."""
    mask_token_id: int | None = None
    """Or its id: a row of the target's table that the tokenizer does not use."""
    target_layer_ids: tuple[int, ...] | None = None
    """Target layers to read, 0-based. Default: five, spread by z-lab's rule."""
    block_size: int = 16
    """Tokens of a block, anchor included."""
    rope_theta: float = 1e7
    """Rotary base; positions are plain token indices."""
    layer_types: tuple[str, ...] | None = None
    """full_attention or sliding_attention for each layer. Default: all full."""
    sliding_window: int | None = None
    """Window of sliding layers in tokens, the query included."""
    input_embedding_scale: float = 1.0
    """Factor on the token rows that the draft receives; stored with the draft. SGLang hands a Gemma
    draft scaled rows, so a Gemma draft should learn with the root of the hidden size."""
    final_logit_softcapping: float | None = None
    """Cap c of the draft's logits, c * tanh(z / c); stored with the draft. Default: none."""

    def __post_init__(self) -> None:
        _positive(
            self, "num_hidden_layers", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rope_theta", "sliding_window",
            "input_embedding_scale", "final_logit_softcapping",
        )  # fmt: skip
        if self.block_size < 2:
            raise ConfigError(f"block_size is {self.block_size}, it must be at least 2")
        if (self.mask_token is None) == (self.mask_token_id is None):
            raise ConfigError(
                f"mask_token is {self.mask_token!r}, mask_token_id {self.mask_token_id}, give one"
            )


@dataclass(frozen=True)
class MTPShape:
    """A new multi-token-prediction head for a Qwen3.5 target; its geometry is the target's."""

    kind: Literal["mtp"] = "mtp"
    draft_tokens: int = 3
    """Tokens of the chains that it is trained and measured with, each on the head's own hidden
    state of the one before."""

    def __post_init__(self) -> None:
        _positive(self, "draft_tokens")


@dataclass(frozen=True)
class Eagle3Shape:
    """Geometry of a new EAGLE-3 draft: one Llama layer and a head of its own over the target's
    vocabulary. Width, vocabulary and frozen token table are the target's."""

    kind: Literal["eagle3"]
    intermediate_size: int
    """Width of the MLP."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key/value heads."""
    head_dim: int
    """Width of a head."""
    draft_tokens: int = 3
    """Steps of the training-time test, each on the draft's own hidden state of the one before, and
    tokens of the chains that it is measured with."""
    target_layer_ids: tuple[int, ...] | None = None
    """The three target layers to read, 0-based. Default: EAGLE's, 1, one before the middle, and
    three before the last."""
    rope_theta: float = 1e7
    """Rotary base; positions are plain token indices."""

    def __post_init__(self) -> None:
        _positive(
            self, "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "draft_tokens", "rope_theta",
        )  # fmt: skip
        ids = self.target_layer_ids
        if ids is None:
            return
        if len(set(ids)) != 3 or len(ids) != 3 or min(ids) < 0:
            raise ConfigError(f"target_layer_ids is {list(ids)}, it must be three different layers")
        if ids[0] == 0:
            raise ConfigError(
                f"target_layer_ids is {list(ids)}, but EAGLE's layout cannot say that layer 0 is "
                "the first; name it later"
            )


@dataclass(frozen=True)
class ChartData:
    """Prompts over charts drawn from the bundled tables; whole table slices are held out."""

    kind: Literal["charts"] = "charts"
    count: int = 1000
    """Training prompts."""
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self, "count")


@dataclass(frozen=True)
class FileData:
    """Prompts of files: `text` and `images`, or `messages` / `conversations` of several turns."""

    path: Path
    """A file, a folder of files that end in `.jsonl` or `.parquet` as `kind` says, or a pattern
    (`data/train-*.parquet`). Image paths are relative to the file that names them."""
    kind: FileKind = "jsonl"
    """jsonl: one JSON object a line. parquet: one row a prompt, images as paths or as the bytes
    that Hugging Face data sets hold."""
    held_out: int = 64
    """The last rows, kept for evaluation."""

    def __post_init__(self) -> None:
        _not_negative(self, "held_out")


@dataclass(frozen=True)
class GenerateConfig(SamplingSettings):
    """The target answers the prompts itself, each row with a seed of its own.

    Held-out prompts are decoded with the same settings.
    """

    batch: int = 32
    """Rows answered at once."""
    max_tokens: int = 256
    """Most tokens of an answer; longer ones are cut and still used."""
    draft: str | None = None
    """Folder or hub id of a draft to answer with, or "mtp". The answers are the target's all the
    same, bit for bit in float32 and up to ties of rounding in bfloat16; they only come sooner."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "batch", "max_tokens")


@dataclass(frozen=True)
class ObjectiveConfig:
    """What a masked slot's loss is, and how much it counts."""

    anchors: int = 32
    """Blocks trained in each row and step. Published recipes draw 512 from rows of 3072 tokens."""
    loss: Literal["ce", "kl"] = "ce"
    """ce: cross-entropy with the token itself. kl: divergence of the draft's distribution from the
    target's at the same place, at temperature 1 and with both soft caps."""
    position: Literal["decay", "dpace"] = "decay"
    """How slots of a block weigh. decay: exp(-(k - 1) / decay) for slot k, since early slots decide
    whether later ones count (DFlash, arXiv 2602.06036). dpace: by how much the slot adds to the
    length that the draft would have accepted now (D-PACE, arXiv 2605.18810)."""
    decay: float | None = None
    """Slots until the weight falls by e. Default: 7, 5 and 4 for blocks of 16, 10 and 8."""
    dpace_alpha: float = 0.5
    """How far D-PACE lifts the draft's probabilities towards 1; at 1 it weighs by what follows."""
    chunk: int | None = None
    """Blocks of each row whose scores and logits exist at once; memory grows with it. Default: as
    many as need 1 GiB of fp32 logits, or of attention scores if those are larger."""

    def __post_init__(self) -> None:
        _positive(self, "anchors", "decay", "chunk")
        if not 0 <= self.dpace_alpha <= 1:
            raise ConfigError(f"dpace_alpha is {self.dpace_alpha}, it must be from 0 to 1")


@dataclass(frozen=True)
class VisualConfig:
    """Visual-KL: answer tokens that hang on the picture weigh more in the loss.

    A second pass of the target over its own answers, with the pictures ablated, gives each answer
    token a score in nats: how far its distribution moves when the picture's content is gone.
    """

    strength: float = 2.0
    """lambda of the weighting: a token weighs 1 + lambda * u before scaling, u in [0, 1). 0 trains
    as without weights, bit for bit."""
    ablation: Ablation = "blank"
    """What stands in for the pictures. blank: mid-grey; patchmask: half of the 16-pixel patches
    black; pixelate: a tenth of the resolution; noise: random pixels; textonly: no pictures, which
    moves positions too."""
    tau: float = 0.5
    """Score in nats at which u = score / (score + tau) is a half."""
    cap: float = 10.0
    """Largest score in nats."""
    low: float = 0.5
    """Smallest weight of a supervised token."""
    high: float = 3.0
    """Largest weight of a supervised token."""
    gate: Literal["none", "confidence"] = "none"
    """confidence: u is multiplied by the target's probability of the token, since a token with many
    right words cannot be foreseen anyway."""
    weighting: Literal["squash", "groups"] = "squash"
    """squash: 1 + lambda * u in the box from low to high, scaled to mean one in each sample.
    groups: the fifth of a sample's tokens with the highest scores holds half of its weight, the
    others the other half; tau, low, high and the size of a positive strength do not matter."""
    seed: int = 0
    """Of random ablations; each sample draws its own from it."""
    batch: int = 8
    """Rows scored at once."""

    def __post_init__(self) -> None:
        _positive(self, "tau", "cap", "low", "batch")
        _not_negative(self, "strength", "seed")
        if self.low > 1:
            raise ConfigError(f"low is {self.low}, it must be at most 1, the mean weight")
        if self.high < 1:
            raise ConfigError(f"high is {self.high}, it must be at least 1, the mean weight")


@dataclass(frozen=True)
class OptimiserConfig:
    """AdamW with warm-up and cosine decay."""

    steps: int = 1000
    """Updates of the draft."""
    batch: int = 16
    """Rows computed at once."""
    accumulate: int = 1
    """Batches whose gradients make one step: as a batch that many times larger, in less memory."""
    learning_rate: float = 6e-4
    warmup: float = 0.04
    """Share of the steps with rising learning rate."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest gradient norm."""
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self, "steps", "batch", "accumulate", "learning_rate", "clip")
        _not_negative(self, "weight_decay")
        if not 0 <= self.warmup <= 1:
            raise ConfigError(f"warmup is {self.warmup}, it must be a share from 0 to 1")


@dataclass(frozen=True)
class MeshConfig:
    """Devices of a training run, `data * fsdp` of them. The target is whole on each."""

    data: int = 1
    """Groups of devices that each hold the draft and its optimiser state once."""
    fsdp: int = 1
    """Devices of a group; each holds a part of every array. Batches are split over all devices."""

    def __post_init__(self) -> None:
        _positive(self, "data", "fsdp")

    @property
    def devices(self) -> int:
        return self.data * self.fsdp


@dataclass(frozen=True)
class TrainConfig:
    """One training run of a draft."""

    target: str
    """Short name, local folder or hub id of the target."""
    output: Path
    """Folder for answers, metrics, checkpoints and the exported draft."""
    draft: DraftShape | MTPShape | Eagle3Shape
    data: ChartData | FileData
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    visual: VisualConfig | None = None
    """Weights of answer tokens by what they owe to the picture. Default: none, plain DFlash."""
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    features: Literal["online", "disk"] = "online"
    """Where the target's features come from. online: a pass of the target in every step. disk: one
    pass over all rows, kept beside the run; epochs after the first cost no target pass. Takes
    2 bytes (4 in float32) x captured layers x hidden size for each token of each row."""
    row_length: int = 1024
    """Tokens of a training row; longer prompt + answer rows are cut."""
    eval_prompts: int = 64
    """Held-out prompts decoded with the new draft at the end."""
    eval_every: int = 0
    """Steps between evaluations on the way, a file in `evaluations/` each. 0: at the end only."""
    log_every: int = 50
    """Steps between metric lines."""
    save_every: int = 1000
    """Steps between checkpoints; the last step always makes one."""
    keep: int = 2
    """Checkpoints kept, newest first."""
    tensorboard: bool | None = None
    """Also write TensorBoard files. Default: if tensorboardX is installed."""
    dtype: Dtype = "auto"
    """Compute dtype; draft parameters and optimiser state are float32."""
    kernels: Kernels = "reference"
    """Implementation of the target's operations, and of a DFlash draft's attention with its
    gradient. gpu: Pallas kernels, on one device; auto: they where they run, in bfloat16;
    reference: plain XLA; interpret: the kernels in Pallas' interpreter, slowly."""

    def __post_init__(self) -> None:
        _positive(self, "row_length", "log_every", "save_every", "keep")
        _not_negative(self, "eval_prompts", "eval_every")
        if self.optimiser.batch % self.mesh.devices:
            raise ConfigError(
                f"optimiser.batch is {self.optimiser.batch}, it must be a multiple of the "
                f"{self.mesh.devices} devices of mesh"
            )
        if self.kernels != "reference" and self.mesh.devices > 1:
            raise ConfigError(
                f"kernels is {self.kernels} and mesh has {self.mesh.devices} devices, but a kernel "
                "is one device's; use kernels reference"
            )
        if self.objective.anchors > self.row_length:
            raise ConfigError(
                f"objective.anchors is {self.objective.anchors}, a row of row_length "
                f"{self.row_length} does not hold as many"
            )


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name} is {value}, it must be positive")


def _not_negative(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 0:
            raise ConfigError(f"{name} is {getattr(config, name)}, it must not be negative")
