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


def make_training_mesh(data: int, fsdp: int) -> Mesh | None:
    """A mesh over the first `data * fsdp` devices of all processes; None for a single device.

    Neighbours share an `fsdp` group: it exchanges parameters, which needs the fast links.
    """
    devices, count = jax.devices(), data * fsdp
    if count > len(devices):
        raise ValueError(f"mesh needs {count} devices, but there are {len(devices)}")
    if count == 1:
        return None
    grid = np.array(devices[:count]).reshape(data, fsdp)
    return Mesh(grid, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_largest_axis(shape: Sequence[int], mesh: Mesh, axis: str) -> NamedSharding:
    """Sharding of the largest dimension that mesh axis `axis` divides; replicated without one."""
    size = mesh.shape[axis]
    places = [place for place, length in enumerate(shape) if length % size == 0]
    if size == 1 or not places:
        return replicated(mesh)
    best = max(places, key=lambda place: shape[place])
    return NamedSharding(mesh, PartitionSpec(*(None,) * best, axis))


def place(tree: Any, sharding: Callable[[Any], Sharding]) -> Any:
    """Host arrays, or arrays of one device, put where `sharding` of each array says.

    Every process holds the same values and fills its own devices.
    """

    def put(array: Any) -> jax.Array:
        there = sharding(array)
        if there.is_fully_addressable:
            return jax.device_put(array, there)
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, there, lambda index: host[index])

    return jax.tree.map(put, tree)


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
