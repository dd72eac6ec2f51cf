"""Batches of training rows: endless, reshuffled, resumable, and split over the devices."""

from collections.abc import Sequence

import grain
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmflash_jax.sharding import place
from mmflash_jax.training.data import Batch, Row, collate
from mmflash_jax.weights.hf_config import ConfigError


def batches(rows: Sequence[Row], batch: int, width: int, seed: int) -> grain.DatasetIterator[Batch]:
    """Endless padded batches, reshuffled every epoch, made ahead by a few threads.

    The iterator's state is a small dict that says how many batches were taken. Every process draws
    the same order and makes whole batches: rows are token ids and image features, little work, and
    one run is then the same on any number of processes.

    Raises:
        ConfigError: the rows do not fill one batch.
    """
    if len(rows) < batch:
        raise ConfigError(
            f"{len(rows)} training rows do not fill the {batch} rows of a step "
            "(optimiser.batch x optimiser.accumulate)"
        )
    order = grain.MapDataset.source(list(range(len(rows)))).seed(seed).shuffle().repeat()
    ready = order.batch(batch).map(lambda chosen: collate([rows[i] for i in chosen], width))
    return iter(ready.to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)))


def to_devices(batch: Batch, mesh: Mesh | None) -> dict[str, jax.Array]:
    """The batch with its rows split over all devices; image features, which rows share, on each."""
    if mesh is None:
        return jax.device_put(batch)

    every = tuple(mesh.axis_names)
    axes = {"media": (), "positions": (None, every)}
    placed = {}
    for name, value in batch.items():
        sharding = NamedSharding(mesh, PartitionSpec(*axes.get(name, (every,))))
        placed[name] = place(value, lambda _, sharding=sharding: sharding)
    return placed
