"""Every user-facing setting. Model architecture is not among them: it comes from checkpoints.

Order of precedence: defaults here < the YAML file < command-line flags.
"""

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from mmflash_jax.weights.hf_config import ConfigError

T = TypeVar("T")
Dtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class ServeConfig:
    """Batched generation: answer prompts, compare with plain decoding, report."""

    target: str = "demo"
    """Short name, local folder or hub id of the target."""
    draft: str | None = None
    """Folder or hub id of the draft, or "none". Default: what the short name brings."""
    prompts: Path | None = None
    """JSONL file of prompts. Default: the bundled sample prompts."""
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
    draft_embedding_scale: float | None = None
    """Factor on the token rows that the draft receives. Default: `input_embedding_scale` of the
    draft's config, or 1. Drafts trained on scaled rows that do not say so (some for Gemma) need the
    root of the hidden size here."""
    plain: bool = True
    """Also decode without the draft, for speed and parity."""
    thinking: bool | None = None
    """Let the model reason before it answers, or not. Default: what its chat template does."""
    model_parallel: int = 1
    """Devices over which the target's weights are split."""

    def __post_init__(self) -> None:
        _positive(
            self, "max_tokens", "max_length", "batch", "model_parallel", "draft_embedding_scale"
        )


@dataclass(frozen=True)
class DraftShape:
    """Geometry of a new draft. Width, vocabulary and layer count of the target are the target's."""

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
    mask_token: str
    """The target's token that stands in masked slots; its embedding stays frozen."""
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
class JsonlData:
    """Prompts of a JSONL file (`text`, `images`), as serve.py reads them."""

    path: Path
    kind: Literal["jsonl"] = "jsonl"
    held_out: int = 64
    """The last lines of the file, kept for evaluation."""

    def __post_init__(self) -> None:
        _not_negative(self, "held_out")


@dataclass(frozen=True)
class GenerateConfig:
    """The target answers the prompts itself, greedily."""

    batch: int = 32
    """Rows answered at once."""
    max_tokens: int = 256
    """Most tokens of an answer; longer ones are cut and still used."""

    def __post_init__(self) -> None:
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
class OptimiserConfig:
    """AdamW with warm-up and cosine decay."""

    steps: int = 1000
    batch: int = 16
    """Rows a step."""
    learning_rate: float = 6e-4
    warmup: float = 0.04
    """Share of the steps with rising learning rate."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest gradient norm."""
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self, "steps", "batch", "learning_rate", "clip")
        _not_negative(self, "weight_decay")
        if not 0 <= self.warmup <= 1:
            raise ConfigError(f"warmup is {self.warmup}, it must be a share from 0 to 1")


@dataclass(frozen=True)
class TrainConfig:
    """One training run of a draft."""

    target: str
    """Short name, local folder or hub id of the target."""
    output: Path
    """Folder for answers, metrics and the exported draft."""
    draft: DraftShape
    data: ChartData | JsonlData
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    row_length: int = 1024
    """Tokens of a training row; longer prompt + answer rows are cut."""
    eval_prompts: int = 64
    """Held-out prompts decoded with the new draft at the end."""
    log_every: int = 50
    """Steps between metric lines."""
    save_every: int = 1000
    """Steps between exports of the draft so far."""
    dtype: Dtype = "auto"
    """Compute dtype; draft parameters and optimiser state are float32."""

    def __post_init__(self) -> None:
        _positive(self, "row_length", "log_every", "save_every")
        _not_negative(self, "eval_prompts")
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


def find_config(name: str) -> Path:
    """A config file by path, or by bare name in `configs/` beside the scripts.

    Raises:
        ConfigError: it is in neither place.
    """
    beside = Path(__file__).parent.parent / "configs" / name
    for path in (Path(name), beside):
        if path.is_file():
            return path
    known = sorted(p.name for p in beside.parent.glob("*.yaml"))
    raise ConfigError(f"no config {name!r}; configs/ holds {', '.join(known) or 'none'}")


def read_yaml(path: Path, kind: type[T]) -> T:
    """Build the dataclass `kind` from a YAML file, strictly.

    Raises:
        ConfigError: unknown, missing or ill-typed fields, by file and dotted name.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    try:
        return build(kind, values, "")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def build(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`: dataclasses, unions of them (by `kind`), tuples, literals and scalars.

    `where` is the dotted name of the value, empty for the whole file.
    """
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        return _build_union(typing.get_args(kind), value, where)
    if origin is Literal:
        if value not in typing.get_args(kind):
            raise ConfigError(f"{where} is {value!r}, allowed: {list(typing.get_args(kind))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} is {value!r}, expected a list")
        inner = typing.get_args(kind)[0]
        return tuple(build(inner, item, f"{where}[{i}]") for i, item in enumerate(value))
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        # YAML 1.1 reads 6e-4 as a string.
        try:
            if math.isfinite(float(value)):
                return float(value)
        except (ValueError, OverflowError):
            pass
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{where} is {value!r}, expected {kind.__name__}")


def _build_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        name = where or "the file"
        raise ConfigError(f"{name} is {value!r}, expected a mapping for {kind.__name__}")
    prefix = f"{where}." if where else ""
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = [f"{prefix}{name}" for name in value if name not in fields]
    if unknown:
        raise ConfigError(f"unknown fields {unknown}; known are {sorted(fields)}")
    missing = [
        f"{prefix}{name}"
        for name, f in fields.items()
        if name not in value
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"missing fields {missing}")
    built = {name: build(hints[name], item, prefix + name) for name, item in value.items()}
    try:
        return kind(**built)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def _build_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    if len(options) == 1:
        return build(options[0], value, where)
    by_kind = {option.__dataclass_fields__["kind"].default: option for option in options}
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind not in by_kind:
        raise ConfigError(f"{where}.kind is {kind!r}, allowed: {sorted(by_kind)}")
    return build(by_kind[kind], value, where)
