"""Shape of the image tower of Gemma 4, from its config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmflash_jax.weights.hf_config import ConfigError, expect, require

CHANNELS = 3
# Of the configuration class of transformers; files may leave it out.
ROPE_THETA = 100.0


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The fields of `vision_config` that decide the computation; names are the file's own.

    `text_hidden_size` is the `hidden_size` of the text decoder, the width of the feature rows.
    """

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    head_dim: int
    patch_size: int
    pooling_kernel_size: int
    position_embedding_size: int
    text_hidden_size: int
    rms_norm_eps: float
    rope_theta: float
    use_clipped_linears: bool
    standardize: bool

    @property
    def patch_values(self) -> int:
        """Values of a flattened patch: row, column, channel."""
        return self.patch_size**2 * CHANNELS

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], text_hidden_size: int) -> "VisionConfig":
        """From the `vision_config` object of a `config.json` and the width of the text decoder.

        Raises:
            ConfigError: a field is missing, contradictory or asks for what is not implemented.
        """
        where = "config.json vision_config"
        expect(
            config,
            where,
            hidden_activation=["gelu_pytorch_tanh"],
            attention_bias=[False, None],
            use_clipped_linears=[True, False],
            standardize=[True, False],
        )
        rope = config.get("rope_parameters") or {}
        # The library reads "default" as "axial" here.
        expect(rope, f"{where} rope_parameters", rope_type=["axial", "default"])
        names = (
            "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
            "head_dim", "patch_size", "pooling_kernel_size", "position_embedding_size",
        )  # fmt: skip
        made = cls(
            **{name: int(require(config, name, where)) for name in names},
            text_hidden_size=text_hidden_size,
            rms_norm_eps=float(require(config, "rms_norm_eps", where)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or ROPE_THETA),
            # Absent means false, as in the library; the checkpoint's tensors must agree.
            use_clipped_linears=config.get("use_clipped_linears", False),
            standardize=config.get("standardize", False),
        )
        expect(config, where, num_key_value_heads=[made.num_attention_heads, None])
        if made.head_dim % 4:
            raise ConfigError(
                f"{where}: head_dim is {made.head_dim}, supported: multiples of 4 (two axes)"
            )
        return made
