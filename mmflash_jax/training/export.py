"""Drafts as other programs read them: z-lab's layout, in bf16."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from mmflash_jax.drafters.dflash import DFlash
from mmflash_jax.layers.schema import Params
from mmflash_jax.sharding import replicated
from mmflash_jax.training.checkpoint import read_newest
from mmflash_jax.weights import export_params, write_checkpoint

log = logging.getLogger(__name__)


def write_draft(folder: Path, drafter: DFlash, params: Params) -> None:
    """Write the draft; parameters that are split over devices are joined first."""
    params = join_parts(params)
    if jax.process_index() == 0:
        tensors = export_params(drafter.weight_rules(), params)
        write_checkpoint(folder, tensors, drafter.config.to_hf())


def join_parts(params: Params) -> Params:
    """Whole parameters on every device; all processes must call it."""
    sharding = next(iter(jax.tree.leaves(params))).sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        # Devices of other processes hold parts too, so this is a computation, not a copy.
        return jax.jit(lambda x: x, out_shardings=replicated(sharding.mesh))(params)
    return params


def as_shipped(params: Params, dtype: str) -> Params:
    """Parameters as a reader of the exported draft has them: rounded to bf16, then in `dtype`."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(dtype), params)


def export_newest(output: Path, folder: Path) -> int:
    """Export the draft of the newest checkpoint of the run in `output`; returns its step.

    Raises:
        ConfigError: there is no checkpoint.
    """
    record, restore = read_newest(output / "checkpoints")
    drafter = DFlash.from_hf(record["draft"], "float32")
    device = SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=device),
        drafter.abstract_params(),
    )
    write_draft(folder, drafter, restore(like))
    log.info("step %d of %s is in %s", record["step"], output, folder)
    return record["step"]
