"""One mesh, made in one place, and ordered rules from parameter paths to its axes."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from mmflash_jax.layers.schema import Path

Rules = Sequence[tuple[str, tuple[str | None, ...]]]


def make_mesh(model: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh whose `model` axis splits weights over that many devices."""
    devices = list(devices or jax.devices())
    if model > len(devices):
        raise ValueError(f"mesh axis model is {model}, but there are {len(devices)} devices")
    grid = np.array(devices[:model])
    return Mesh(grid, ("model",), axis_types=(AxisType.Auto,))


def sharding_by_rules(rules: Rules, mesh: Mesh | None) -> Callable[[Path], Sharding | None]:
    """Sharding of a parameter path: the first rule that matches, replicated without one."""
    compiled = [(re.compile(pattern), axes) for pattern, axes in rules]

    def sharding(path: Path) -> Sharding | None:
        if mesh is None:
            return None
        dotted = ".".join(str(key) for key in path)
        for pattern, axes in compiled:
            if pattern.search(dotted):
                return NamedSharding(mesh, PartitionSpec(*axes))
        return NamedSharding(mesh, PartitionSpec())

    return sharding
