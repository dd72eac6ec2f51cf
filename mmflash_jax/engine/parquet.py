"""Rows of a parquet file, one row group in memory at a time."""

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mmflash_jax.engine.prompts import PromptError

log = logging.getLogger(__name__)


def parquet_rows(
    file: Path, columns: tuple[str, ...]
) -> Iterator[tuple[int, Callable[[], dict[str, Any]]]]:
    """Number of each row, from 1, and a function that reads those of `columns` that it fills.

    Raises:
        FileNotFoundError: there is no such file.
        PromptError: it is no parquet file, or has none of the columns.
    """
    try:
        with pq.ParquetFile(file) as opened:
            names, sizes = opened.schema_arrow.names, _group_sizes(opened)
    except pa.ArrowInvalid as error:
        raise PromptError(f"{file} is no readable parquet file: {error}") from None
    used = tuple(name for name in names if name in columns)
    if not used:
        raise PromptError(f"{file} has the columns {names}, prompts need some of {columns}")
    if unused := sorted(set(names) - set(used)):
        log.warning("%s: the columns %s are not read", file, unused)
    before = 0
    for group, size in enumerate(sizes):
        for row in range(size):
            yield before + row + 1, functools.partial(_read_row, file, used, group, row)
        before += size


def _group_sizes(opened: pq.ParquetFile) -> list[int]:
    footer = opened.metadata
    return [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]


def _read_row(file: Path, columns: tuple[str, ...], group: int, row: int) -> dict[str, Any]:
    (values,) = _read_group(file, columns, group).slice(row, 1).to_pylist()
    return {name: value for name, value in values.items() if value is not None}


# Rows are read in order, again and again: to be checked, answered and scored.
@functools.lru_cache(maxsize=1)
def _read_group(file: Path, columns: tuple[str, ...], group: int) -> pa.Table:
    try:
        with pq.ParquetFile(file) as opened:
            return opened.read_row_group(group, columns=list(columns))
    except (pa.ArrowInvalid, OSError) as error:
        raise PromptError(f"{file} is damaged in row group {group}: {error}") from None
