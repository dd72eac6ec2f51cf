"""Batches of training rows: endless, reshuffled, resumable, and split over the devices."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import grain
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmflash_jax.sharding import place, replicated
from mmflash_jax.training.data import Batch, Row, collate
from mmflash_jax.weights.hf_config import ConfigError


class RowStore(Protocol):
    """More arrays of the rows, kept elsewhere."""

    def batch(self, rows: Sequence[int], width: int, places: Iterable[int]) -> Batch:
        """Arrays of `rows`, padded to `width`; only those at `places` need be right."""
        ...


def batches(
    rows: Sequence[Row],
    batch: int,
    width: int,
    seed: int,
    store: RowStore | None = None,
    mesh: Mesh | None = None,
) -> grain.DatasetIterator[Batch]:
    """Endless padded batches, reshuffled every epoch, made ahead by a few threads.

    The iterator's state is a small dict that says how many batches were taken. Every process draws
    the same order, so one run is the same on any number of processes, and makes whole batches of
    token ids and image features, little work. What `store` holds is read for the rows of a
    process's own devices on `mesh` alone; the other rows of its batches are zero there.

    Raises:
        ConfigError: the rows do not fill one batch.
    """
    if len(rows) < batch:
        raise ConfigError(
            f"{len(rows)} training rows do not fill the {batch} rows of a step "
            "(optimiser.batch x optimiser.accumulate)"
        )
    own = places_here(batch, mesh)

    def make(chosen: Sequence[int]) -> Batch:
        made = collate([rows[index] for index in chosen], width)
        return made if store is None else made | store.batch(chosen, width, own)

    order = grain.MapDataset.source(list(range(len(rows)))).seed(seed).shuffle().repeat()
    # Stored arrays are large: fewer batches wait.
    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=8 if store is None else 4)
    return iter(order.batch(batch).map(make).to_iter_dataset(options))


def split_rows(mesh: Mesh) -> NamedSharding:
    """The first axis split over all devices."""
    return NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))


def places_here(batch: int, mesh: Mesh | None) -> list[int]:
    """Which rows of a batch this process's devices hold."""
    if mesh is None:
        return list(range(batch))
    parts = split_rows(mesh).addressable_devices_indices_map((batch,)).values()
    return sorted({place for part in parts if part for place in range(batch)[part[0]]})


def to_devices(batch: Batch, mesh: Mesh | None) -> dict[str, jax.Array]:
    """The batch with its rows split over all devices; image features, which rows share, on each."""
    if mesh is None:
        return jax.device_put(batch)

    axes = {
        "media": replicated(mesh),
        "positions": NamedSharding(mesh, PartitionSpec(None, tuple(mesh.axis_names))),
    }
    placed = {}
    for name, value in batch.items():
        sharding = axes.get(name, split_rows(mesh))
        placed[name] = place(value, lambda _, sharding=sharding: sharding)
    return placed
