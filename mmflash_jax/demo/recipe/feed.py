"""Renders training examples in worker processes and keeps a large ring of them on the device."""

import mmap
import multiprocessing
import random
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import Tensor

from mmflash_jax.demo.charts import COLUMNS, HEIGHT, ROWS, STYLES, WIDTH
from mmflash_jax.demo.corpus import sample_examples
from mmflash_jax.demo.recipe.prompts import SEQUENCE_LENGTH, PromptWriter

UNSUPERVISED_GLYPH = 255  # an ordinary chart's characters belong to no cell

# What one example takes: picture, glyph codes, ids, (answer start, answer end).
_FIELDS = (
    ((HEIGHT, WIDTH, 3), np.uint8),
    ((ROWS, COLUMNS), np.uint8),
    ((SEQUENCE_LENGTH,), np.int16),
    ((2,), np.int16),
)
_SLOTS_EACH = 2


@dataclass(frozen=True)
class FeedSettings:
    """`pool` is the ring's size a style, `chunk` the examples a worker renders at once."""

    workers: int
    chunk: int
    pool: int
    seed: int


class ExampleFeed:
    """Start it before the device is used: the workers are forked."""

    def __init__(self, settings: FeedSettings, writer: PromptWriter) -> None:
        self.settings = settings
        context = multiprocessing.get_context("fork")
        self._slots, self._pipes, self._processes, self._ordered = [], [], [], []
        for worker in range(settings.workers):
            slots = [_shared_chunk(settings.chunk) for _ in range(_SLOTS_EACH)]
            ours, theirs = context.Pipe()
            arguments = (worker, theirs, slots, settings, writer)
            process = context.Process(target=_render_forever, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)
            self._slots.append(slots)
            self._pipes.append(ours)
            self._ordered.append([0] * _SLOTS_EACH)
            for slot in range(_SLOTS_EACH):
                ours.send((slot, 0))
        self.made = [0, 0]
        self.filled = [0, 0]
        self.wants_ordinary = False
        self._random = random.Random(settings.seed)

    def attach(self, device: str) -> None:
        """Allocate the ring; both styles share one tensor a field, snapped charts first."""
        size = 2 * self.settings.pool
        self._pool = [
            torch.empty((size, *shape), dtype=_torch_dtype(dtype), device=device)
            for shape, dtype in _FIELDS
        ]
        self._stream = torch.cuda.Stream() if device == "cuda" else None

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Pictures, glyph codes, ids, answer starts and ends of the given ring entries."""
        images, codes, ids, bounds = (field[index] for field in self._pool)
        return images, codes, ids.long(), bounds[:, 0].long(), bounds[:, 1].long()

    def draw(self, batches: int, batch: int, ordinary_share: float) -> Tensor:
        """Random ring entries for several batches at once."""
        size = (batches, batch)
        ready = ordinary_share if self.filled[1] >= self.settings.chunk else 0.0
        generator = np.random.default_rng(self._random.getrandbits(64))
        snapped = generator.integers(0, self.filled[0], size)
        ordinary = self.settings.pool + generator.integers(0, max(1, self.filled[1]), size)
        return torch.from_numpy(np.where(generator.random(size) < ready, ordinary, snapped))

    def pump(self, limit: int) -> None:
        """Move up to `limit` finished chunks to the device and order new ones."""
        moved = 0
        for worker in self._random.sample(range(len(self._pipes)), len(self._pipes)):
            pipe = self._pipes[worker]
            if moved >= limit or not pipe.poll():
                continue
            slot = pipe.recv()
            style = self._ordered[worker].pop(0)
            self._store(style, self._slots[worker][slot])
            moved += 1
            behind = self.made[1] < 0.9 * self.made[0]
            order = int(self.wants_ordinary and (behind or self._random.random() < 0.5))
            self._ordered[worker].append(order)
            pipe.send((slot, order))

    def wait_for(self, count: int) -> None:
        while self.filled[0] < count:
            self.pump(8)
            time.sleep(0.002)

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()

    def _store(self, style: int, chunk: list[np.ndarray]) -> None:
        count = self.settings.chunk
        usable = self.settings.pool // count * count
        start = style * self.settings.pool + self.made[style] % usable
        with torch.cuda.stream(self._stream):
            for field, source in zip(self._pool, chunk, strict=True):
                target = field[start : start + count]
                target.copy_(torch.from_numpy(source), non_blocking=True)
        if self._stream is not None:
            # The worker may overwrite the chunk once it is ordered again.
            self._stream.synchronize()
        self.made[style] += count
        self.filled[style] = min(self.made[style], usable)


def _torch_dtype(dtype: type) -> torch.dtype:
    return torch.uint8 if dtype is np.uint8 else torch.int16


def _shared_chunk(count: int) -> list[np.ndarray]:
    arrays = []
    for shape, dtype in _FIELDS:
        size = count * int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays.append(np.frombuffer(mmap.mmap(-1, size), dtype).reshape(count, *shape))
    return arrays


def _render_forever(
    worker: int,
    pipe: Connection,
    slots: list[list[np.ndarray]],
    settings: FeedSettings,
    writer: PromptWriter,
) -> None:
    round_number = 0
    while True:
        slot, style = pipe.recv()
        seed = settings.seed + 7919 * (worker + 1) + 1_000_003 * round_number
        round_number += 1
        examples = sample_examples(settings.chunk, seed, style=STYLES[style])
        encoded = writer.encode_examples(examples)
        # An example that is too long gives its place to one that fits.
        rows = np.where(encoded.fits, np.arange(settings.chunk), int(np.argmax(encoded.fits)))
        images, codes, ids, bounds = slots[slot]
        for target, row in enumerate(rows):
            images[target] = examples[row].image
            codes[target] = UNSUPERVISED_GLYPH if style else examples[row].glyph_codes
        ids[:] = encoded.ids[rows]
        bounds[:, 0], bounds[:, 1] = encoded.starts[rows], encoded.ends[rows]
        pipe.send(slot)
