"""Settings of draft training: prompts, answers, objective, optimiser, devices.

Order of precedence: defaults here < the YAML file < command-line flags.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mmflash_jax.config import (
    Dtype,
    FileKind,
    Kernels,
    SamplingSettings,
    no_named_kernels,
    not_negative,
    positive,
)
from mmflash_jax.config_drafts import DraftShape, Eagle3Shape, MTPShape
from mmflash_jax.weights.hf_config import ConfigError

Ablation = Literal["blank", "patchmask", "pixelate", "noise", "textonly"]


@dataclass(frozen=True)
class ChartData:
    """Prompts over charts drawn from the bundled tables; whole table slices are held out."""

    kind: Literal["charts"] = "charts"
    count: int = 1000
    """Training prompts."""
    seed: int = 0

    def __post_init__(self) -> None:
        positive(self, "count")


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
        not_negative(self, "held_out")


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
        positive(self, "batch", "max_tokens")


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
        positive(self, "anchors", "decay", "chunk")
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
        positive(self, "tau", "cap", "low", "batch")
        not_negative(self, "strength", "seed")
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
        positive(self, "steps", "batch", "accumulate", "learning_rate", "clip")
        not_negative(self, "weight_decay")
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
        positive(self, "data", "fsdp")

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
        positive(self, "row_length", "log_every", "save_every", "keep")
        not_negative(self, "eval_prompts", "eval_every")
        if self.optimiser.batch % self.mesh.devices:
            raise ConfigError(
                f"optimiser.batch is {self.optimiser.batch}, it must be a multiple of the "
                f"{self.mesh.devices} devices of mesh"
            )
        if self.mesh.devices > 1:
            why = f"mesh has {self.mesh.devices} devices, but a kernel is one device's"
            no_named_kernels(self.kernels, why)
        if isinstance(self.draft, Eagle3Shape):
            no_named_kernels(self.kernels, "draft.kind is eagle3, whose trees no kernel takes")
        if self.objective.anchors > self.row_length:
            raise ConfigError(
                f"objective.anchors is {self.objective.anchors}, a row of row_length "
                f"{self.row_length} does not hold as many"
            )
