"""Metrics of a run: a CSV file that always is, TensorBoard files for those who have it."""

import csv
import importlib.util
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmflash_jax.weights.hf_config import ConfigError


class MetricsWriter:
    """Writes one line for each logged step. Used as a context, which closes the files.

    A run that goes on after `step` drops what was written of later steps, for it makes them again,
    and goes on counting the seconds.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], *, step: int, tensorboard: bool | None = None
    ):
        """`tensorboard`: None writes it if tensorboardX is installed.

        Raises:
            ConfigError: it is asked for and missing, or the CSV file has other columns.
        """
        self._names = tuple(names)
        self._board = _tensorboard(folder / "tensorboard", tensorboard, step)
        path = folder / "metrics.csv"
        columns = ["step", *names, "seconds"]
        kept = _lines_until(path, columns, step)
        # Replaced in one move: a stop in between leaves the old file.
        part = path.with_suffix(".tmp")
        with part.open("w", newline="") as stream:
            csv.writer(stream, lineterminator="\n").writerows([columns, *kept])
        part.replace(path)
        self._stream = path.open("a", newline="")
        self._began = time.perf_counter() - (float(kept[-1][-1]) if kept else 0.0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        seconds = round(time.perf_counter() - self._began, 2)
        row = [step, *(values[name] for name in self._names), seconds]
        csv.writer(self._stream, lineterminator="\n").writerow(row)
        self._stream.flush()
        if self._board is not None:
            for name in self._names:
                self._board.add_scalar(f"train/{name}", values[name], step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        if self._board is not None:
            self._board.close()


def _lines_until(path: Path, columns: Sequence[str], step: int) -> list[list[str]]:
    if step == 0 or not path.exists():
        return []
    with path.open(newline="") as stream:
        header, *rows = csv.reader(stream)
    if header != list(columns):
        raise ConfigError(f"{path} has the columns {header}, this run writes {list(columns)}")
    # A line that was cut off when the machine went down is none.
    return [row for row in rows if len(row) == len(columns) and int(row[0]) <= step]


def _tensorboard(folder: Path, wanted: bool | None, step: int) -> Any:
    found = importlib.util.find_spec("tensorboardX") is not None
    if wanted and not found:
        raise ConfigError(
            "tensorboard is true, but tensorboardX is not installed: "
            "pip install 'mmflash-jax[tensorboard]'"
        )
    if wanted is False or not found:
        return None
    import tensorboardX  # pyright: ignore[reportMissingImports]

    # Readers hide what an interrupted run wrote of steps that are made again.
    return tensorboardX.SummaryWriter(str(folder), purge_step=step + 1 if step else None)
