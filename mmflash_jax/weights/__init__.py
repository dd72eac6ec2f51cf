"""Checkpoints on disk: two-way tensor tables, strict import and export, lazy reading."""

from mmflash_jax.weights.projections import attention_projections, mlp_projections
from mmflash_jax.weights.rules import (
    IDENTITY,
    SQUEEZE_CONV1D,
    TRANSPOSE,
    Rule,
    Transform,
    WeightsError,
    export_params,
    flatten_patches,
    import_params,
    side_by_side,
)
from mmflash_jax.weights.store import TensorStore, write_checkpoint

__all__ = [
    "IDENTITY",
    "SQUEEZE_CONV1D",
    "TRANSPOSE",
    "Rule",
    "TensorStore",
    "Transform",
    "WeightsError",
    "attention_projections",
    "export_params",
    "flatten_patches",
    "import_params",
    "mlp_projections",
    "side_by_side",
    "write_checkpoint",
]
