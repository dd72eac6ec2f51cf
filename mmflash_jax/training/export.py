"""Drafts as other programs read them, in bf16, from checkpoints of a run or from draft folders.

    python -m mmflash_jax.training.export runs/x draft --step 2000
    python -m mmflash_jax.training.export draft other --layout speculators --target qwen35-4b

z-lab's layout is the one that SGLang and vLLM load; the layout of the speculators library is read
by vLLM and by that library itself. An MTP head is written as its target's files hold it, an EAGLE-3
draft in EAGLE's layout. What was written is read back and compared.
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from mmflash_jax.drafters import DRAFTERS, DFlash
from mmflash_jax.drafters.speculators_layout import to_speculators
from mmflash_jax.layers.schema import Params
from mmflash_jax.load import load_any_drafter
from mmflash_jax.registry import PAIRS, pair
from mmflash_jax.sharding import replicated
from mmflash_jax.training.checkpoint import read_checkpoint
from mmflash_jax.training.objective import Trained
from mmflash_jax.weights import TensorStore, WeightsError, export_params, write_checkpoint
from mmflash_jax.weights.hf_config import ConfigError, read_json, require

log = logging.getLogger(__name__)

Layout = Literal["zlab", "speculators"]


@dataclass(frozen=True)
class Arguments:
    """Write a draft into a folder, in one of two layouts."""

    source: Annotated[Path, tyro.conf.Positional]
    """Output folder of a training run, or a draft in either layout."""
    folder: Annotated[Path, tyro.conf.Positional]
    """Where to write it."""
    step: int | None = None
    """Checkpoint of the run. Default: the newest."""
    layout: Layout = "zlab"
    target: str | None = None
    """Short name, folder or hub id of the target, which the speculators layout names. Default:
    that of the run."""


def write_draft(
    folder: Path,
    drafter: Trained,
    params: Params,
    layout: Layout = "zlab",
    target: str | None = None,
) -> None:
    """Write the draft; parameters that are split over devices are joined first.

    Raises:
        ConfigError: the speculators layout cannot describe the draft, or `target` is not given.
        WeightsError: what was written does not read back as the same draft.
    """
    params = join_parts(params)
    if jax.process_index() == 0:
        config = drafter.config.to_hf()
        if layout == "speculators":
            if not isinstance(drafter, DFlash):
                raise ConfigError(
                    "the speculators layout holds DFlash drafts here; leave it out to write an MTP "
                    "head as its target's files hold it, or an EAGLE-3 draft in EAGLE's layout"
                )
            config = to_speculators(config, *_verifier(target))
        tensors = export_params(drafter.weight_rules(), params)
        write_checkpoint(folder, tensors, config)
        _check_written(folder, drafter, tensors)


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


def export_run(
    output: Path,
    folder: Path,
    *,
    step: int | None = None,
    layout: Layout = "zlab",
    target: str | None = None,
) -> int:
    """Export the draft of a checkpoint of the run in `output`, the newest or `step`; its step.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    record, restore = read_checkpoint(output / "checkpoints", step)
    drafter = DRAFTERS[record["draft"]["architectures"][0]].from_hf(record["draft"], "float32")
    device = SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=device),
        drafter.abstract_params(),
    )
    write_draft(folder, drafter, restore(like), layout, target or record["settings"]["target"])
    log.info("step %d of %s is in %s", record["step"], output, folder)
    return record["step"]


def _verifier(target: str | None) -> tuple[str, list[str]]:
    """Name and architectures of the target, for the speculators layout."""
    if target is None:
        raise ConfigError("the speculators layout names the target; give it with --target")
    path = pair(target, "none")[0] / "config.json"
    name = PAIRS[target].target if target in PAIRS else target
    return name, require(read_json(path), "architectures", str(path))


def _check_written(folder: Path, drafter: Trained, tensors: dict[str, np.ndarray]) -> None:
    read = type(drafter.config).from_hf(read_json(folder / "config.json"))
    if read != drafter.config:
        raise WeightsError(f"{folder}/config.json reads back as {read}, not as {drafter.config}")
    store = TensorStore(folder)
    changed = sorted(store.keys() ^ tensors.keys()) + [
        name
        for name, value in tensors.items()
        if name in store and store[name].tobytes() != value.tobytes()
    ]
    if changed:
        raise WeightsError(f"{folder}: tensors do not read back as written: {', '.join(changed)}")


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    arguments = tyro.cli(Arguments, description=__doc__)
    given: dict[str, Any] = {"layout": arguments.layout, "target": arguments.target}
    try:
        if (arguments.source / "checkpoints").is_dir():
            export_run(arguments.source, arguments.folder, step=arguments.step, **given)
        elif arguments.step is not None:
            raise ConfigError(
                f"step is {arguments.step}, but {arguments.source} has no checkpoints"
            )
        else:
            write_draft(arguments.folder, *load_any_drafter(arguments.source, "bfloat16"), **given)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
