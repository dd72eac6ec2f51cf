"""Rows of benchmark files: parquet, TSV with base64 pictures, JSON beside a folder of pictures."""

import contextlib
import csv
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmflash_jax.engine.image_sources import image_source
from mmflash_jax.engine.images import ImageError, Source, StoredImage
from mmflash_jax.engine.prompts import PromptError

LONGEST_INDEX = 64
"""Characters. Longer text in a TSV's image column is a picture, shorter may name an earlier row."""


class BenchmarkError(ValueError):
    """A local copy of a benchmark is missing, partial or of another layout; the message says how
    to mend it."""


@dataclass(frozen=True)
class Row:
    """One row of a file.

    where: file and number, for messages. read: its fields that are filled.
    in_file: `read` reads them anew, they are not kept.
    """

    where: str
    file: Path
    read: Callable[[], dict[str, Any]]
    in_file: bool = False

    def picture(self, column: str, folders: Sequence[str], numbered: str = "") -> Source:
        """The picture that a column holds or names; `folders` are tried in order for its file.

        numbered: how names of files end whose column holds a number alone.

        Raises:
            ImageError: no picture, or its file is in none of the folders.
        """
        folder = self.file.parent
        value = self.read().get(column)
        if isinstance(value, int):
            value = f"{value}{numbered}"
        source = image_source(value, folder)
        if isinstance(source, bytes):
            if not self.in_file:
                return source
            return StoredImage(f"{self.where}, {column}", self._bytes_of(column))
        name = str(value["path"] if isinstance(value, dict) else value)
        tried = [folder / other / name for other in folders]
        found = next((path for path in tried if path.is_file()), None)
        if found is None:
            raise ImageError(f"there is no picture {' or '.join(map(str, tried))}")
        return found

    def _bytes_of(self, column: str) -> Callable[[], bytes]:
        def read() -> bytes:
            again = image_source(self.read()[column], self.file.parent)
            assert isinstance(again, bytes)
            return again

        return read


def columns_of(file: Path) -> list[str]:
    """Names of a file's columns or fields, filled or not.

    Raises:
        BenchmarkError: the file is of an unknown kind or damaged.
    """
    readers = {".parquet": _schema, ".tsv": _header, ".json": _fields}
    _check_kind(file, readers)
    return readers[file.suffix](file)


def read_rows(file: Path) -> Iterator[Row]:
    """Rows in order; those of parquet files stay there until they are read.

    Raises:
        BenchmarkError: the file is of an unknown kind or damaged.
    """
    readers = {".parquet": _parquet, ".tsv": _tsv, ".json": _json}
    _check_kind(file, readers)
    yield from readers[file.suffix](file)


def _check_kind(file: Path, known: Iterable[str]) -> None:
    if file.suffix not in known:
        raise BenchmarkError(f"{file}: expected a file that ends in {', '.join(known)}")


@contextlib.contextmanager
def _readable(file: Path, kind: str) -> Iterator[None]:
    """What a damaged file makes readers stumble on, as one error. pyarrow's is a ValueError too."""
    try:
        yield
    except (ValueError, csv.Error) as error:
        raise BenchmarkError(f"{file} is no readable {kind} file: {error}") from None


def _schema(file: Path) -> list[str]:
    # Slow to import, and not needed for the other kinds.
    import pyarrow.parquet as pq

    with _readable(file, "parquet"):
        return pq.read_schema(file).names


def _parquet(file: Path) -> Iterator[Row]:
    from mmflash_jax.engine.parquet import parquet_rows

    for number, read in parquet_rows(file, tuple(_schema(file))):
        yield Row(f"{file} row {number}", file, functools.partial(_reread, read), in_file=True)


def _reread(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return read()
    except PromptError as error:
        raise BenchmarkError(str(error)) from None


def _header(file: Path) -> list[str]:
    with _readable(file, "TSV"), file.open(encoding="utf-8", newline="") as stream:
        return next(csv.reader(stream, delimiter="\t"), [])


def _tsv(file: Path) -> Iterator[Row]:
    """Rows of VLMEvalKit's files, whose image may be the index of a row before it."""
    csv.field_size_limit(sys.maxsize)
    pictures: dict[str, str] = {}
    with _readable(file, "TSV"), file.open(encoding="utf-8", newline="") as stream:
        for number, values in enumerate(csv.DictReader(stream, delimiter="\t"), start=1):
            filled = {k: v for k, v in values.items() if k and v and v.casefold() != "nan"}
            image = filled.get("image", "")
            if image and len(image) <= LONGEST_INDEX:
                filled["image"] = pictures.get(image, image)
            elif image:
                pictures[filled.get("index", str(number))] = image
            yield Row(f"{file} row {number}", file, functools.partial(dict, filled))


@functools.lru_cache(maxsize=2)
def _load(file: Path) -> Any:
    with _readable(file, "JSON"):
        return json.loads(file.read_text(encoding="utf-8"))


def _entries(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of a list, or of an object whose keys are their ids."""
    content = _load(file)
    if not isinstance(content, dict | list):
        raise BenchmarkError(f"{file} holds a {type(content).__name__}, expected a list of objects")
    items = content.items() if isinstance(content, dict) else enumerate(content, start=1)
    for key, values in items:
        if not isinstance(values, dict):
            raise BenchmarkError(f"{file}: {key} is a {type(values).__name__}, expected an object")
        yield str(key), values


def _fields(file: Path) -> list[str]:
    return sorted({name for _, values in _entries(file) for name in values})


def _json(file: Path) -> Iterator[Row]:
    for key, values in _entries(file):
        filled = {name: value for name, value in values.items() if value is not None}
        yield Row(f"{file} entry {key}", file, functools.partial(dict, filled))
