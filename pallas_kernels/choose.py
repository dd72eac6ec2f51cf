"""Which implementation of an operation runs: asked for by name, or picked."""

import functools
import logging
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Kernels = Literal["auto", "reference", "gpu", "interpret"]
"""reference: plain jax.numpy. gpu: the Pallas kernel. interpret: the same kernel in Pallas'
interpreter, on any device and slowly. auto: the kernel where it runs and pays, else reference."""

PROCESSORS = 132
"""Streaming multiprocessors of an H200, for which tiles are chosen."""

log = logging.getLogger(__name__)


class KernelError(ValueError):
    """A kernel was asked for by name and cannot run here."""


def platform() -> str:
    """What is compiled for: the device of the abstract mesh in use, else the default backend.

    The former is how a program is compiled for a device that is not here.
    """
    named = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if named is None else named.platform


def compute_capability() -> str | None:
    """Of the NVIDIA GPU that is compiled for; None elsewhere."""
    if platform() != "gpu":
        return None
    if jax.sharding.get_abstract_mesh().abstract_device is not None:
        # Nothing but an H200 is compiled for from afar (benchmarks/compiled.py).
        return "9.0"
    return getattr(jax.devices()[0], "compute_capability", None)


def implementation(
    op: str, asked: Kernels, dtype: DTypeLike, obstacle: str | None
) -> Literal["reference", "gpu", "interpret"]:
    """The implementation of `op` for arguments of `dtype`.

    `obstacle` says why the kernel cannot take these arguments. A choice by name never falls back;
    "auto" does, and says so once. It leaves fp32 to the reference: kernels are fast in 16 bits.

    Raises:
        KernelError: a kernel asked for by name cannot run.
    """
    if asked == "reference":
        return "reference"
    on_gpu = platform() == "gpu"
    if asked == "auto":
        if not on_gpu or jnp.dtype(dtype).itemsize != 2:
            return "reference"
        if obstacle is not None:
            _tell(op, obstacle)
            return "reference"
        return "gpu"
    if asked == "gpu" and not on_gpu:
        obstacle = f"the default device is a {platform()}"
    if obstacle is not None:
        raise KernelError(f"{op}: kernels {asked!r} cannot run: {obstacle}; use auto or reference")
    return asked


@functools.cache
def _tell(op: str, obstacle: str) -> None:
    log.warning("%s: reference instead of the GPU kernel: %s", op, obstacle)
