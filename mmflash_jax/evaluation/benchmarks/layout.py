"""From a local copy of a benchmark to its questions: where files lie, how columns are called."""

import logging
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmflash_jax.engine.images import ImageError
from mmflash_jax.evaluation.benchmarks.question import Question, Rule, Style, word
from mmflash_jax.evaluation.benchmarks.rows import BenchmarkError, Row, columns_of, read_rows

log = logging.getLogger(__name__)

_SHARD = re.compile(r"(.*-)(\d{5})-of-(\d{5})")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a row asks; fields as of `Question`, and `wanted`, the form of an answer (`word`)."""

    question: str
    wanted: str
    answer: str | None
    rule: Rule
    choices: tuple[str, ...] = ()
    tolerance: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark's published layouts.

    source: where a copy comes from, for messages.
    files: patterns of its scored split; those of the first one that matches are read.
    together: names of files of which none may be there alone.
    columns: our name of what a question needs -> what files call it; the first one present counts.
    optional: the same of what only some layouts or rows have.
    pictures: columns that hold or name the picture, best first.
    folders: where picture files may lie, relative to the file that names them.
    numbered: how names of files end that a column names by number.
    images: what to unpack if they are missing.
    ask: what a row asks, from its values under our names; ValueError for one that makes no sense.
    """

    name: str
    source: str
    files: tuple[str, ...]
    together: tuple[str, ...] = ()
    columns: Mapping[str, tuple[str, ...]]
    optional: Mapping[str, tuple[str, ...]]
    pictures: tuple[str, ...]
    folders: tuple[str, ...] = (".",)
    numbered: str = ""
    images: str = ""
    ask: Callable[[Mapping[str, Any]], Asked]

    def read(self, path: Path, count: int | None, seed: int, style: Style) -> list[Question]:
        """Questions of the copy at `path`, a folder or a file; `count` of them, drawn by `seed`.

        Raises:
            BenchmarkError: files, shards, columns or pictures are missing.
        """
        rows = []
        for file in self._find(path):
            names = self._names(file)
            rows += [(row, names) for row in read_rows(file)]
        if not rows:
            raise BenchmarkError(f"{self.name}: {path} holds no rows")
        if count is not None and count < len(rows):
            kept = sorted(random.Random(seed).sample(range(len(rows)), count))
            rows = [rows[index] for index in kept]
        return self._questions(rows, style)

    def _find(self, path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise BenchmarkError(f"{self.name}: there is no folder or file {path}")
        for pattern in self.files:
            if found := sorted(path.glob(pattern)):
                self._check_whole(found)
                return found
        raise BenchmarkError(
            f"{self.name}: {path} holds none of {', '.join(self.files)}. Download {self.source} "
            "there, or name a file of it"
        )

    def _check_whole(self, files: Sequence[Path]) -> None:
        """Files that belong together, and every `NAME-00001-of-00003`, must have their siblings."""
        names = {file.name for file in files}
        absent = [name for name in self.together if name not in names]
        if absent and names & set(self.together):
            raise BenchmarkError(
                f"{self.name}: {files[0].parent} lacks {', '.join(absent)}. Download the rest of "
                f"{self.source}"
            )
        here: dict[tuple[str, str], set[str]] = {}
        for file in files:
            if shard := _SHARD.match(file.name):
                name, number, count = shard.groups()
                here.setdefault((name, count), set()).add(number)
        for (name, count), numbers in here.items():
            wanted = [f"{number:05d}" for number in range(int(count))]
            if lacking := [number for number in wanted if number not in numbers]:
                parts = ", ".join(f"{name}{number}-of-{count}*" for number in lacking)
                raise BenchmarkError(
                    f"{self.name}: {files[0].parent} holds {len(numbers)} of {int(count)} parts, "
                    f"{parts} is missing. Download the rest of {self.source}"
                )

    def _names(self, file: Path) -> dict[str, str]:
        """Our names -> those of the file."""
        there = columns_of(file)

        def find(spellings: Sequence[str]) -> str | None:
            return next((name for name in spellings if name in there), None)

        found = {name: find(spellings) for name, spellings in self.columns.items()}
        lacking = [" or ".join(self.columns[name]) for name, own in found.items() if own is None]
        if find(self.pictures) is None:
            lacking.append(" or ".join(self.pictures))
        if lacking:
            raise BenchmarkError(
                f"{self.name}: {file} lacks the columns {'; '.join(lacking)} (it has "
                f"{', '.join(there)}). Is it of {self.source}?"
            )
        found |= {name: find(spellings) for name, spellings in self.optional.items()}
        return {name: own for name, own in found.items() if own is not None}

    def _questions(
        self, rows: Sequence[tuple[Row, Mapping[str, str]]], style: Style
    ) -> list[Question]:
        questions, bad, unseen = [], [], []
        for number, (row, names) in enumerate(rows, start=1):
            there = row.read()
            values = {ours: there[own] for ours, own in names.items() if own in there}
            try:
                asked = self.ask(values)
                column = next((name for name in self.pictures if name in there), "")
                picture = row.picture(column, self.folders, self.numbered)
            except ImageError as error:
                unseen.append(f"{row.where}: {error}")
                continue
            except ValueError as error:
                bad.append(f"{row.where}: {error}")
                continue
            questions.append(
                Question(
                    id=str(values.get("id", number)),
                    text=word(asked.question, asked.wanted, style, asked.choices),
                    images=(picture,),
                    answer=asked.answer,
                    rule=asked.rule,
                    choices=asked.choices,
                    tolerance=asked.tolerance,
                )
            )
        if unseen:
            fix = f" Unpack {self.images}." if self.images else ""
            raise BenchmarkError(
                f"{self.name}: {len(unseen)} of {len(rows)} questions have no picture, the first "
                f"{unseen[0]}.{fix}"
            )
        for message in bad:
            log.warning("%s: left out, %s", self.name, message)
        if not questions:
            raise BenchmarkError(f"{self.name}: no row makes a question, the first {bad[0]}")
        return questions


def need(values: Mapping[str, Any], name: str) -> str:
    """A value that must be there, as text. Raises ValueError if it is not."""
    if name not in values or not str(values[name]).strip():
        raise ValueError(f"it has no {name}")
    return str(values[name]).strip()


def known(values: Mapping[str, Any], name: str = "answer") -> str | None:
    """A value as text, None if it is not there: the answers of test splits are not published."""
    text = str(values.get(name, "")).strip()
    return text or None
