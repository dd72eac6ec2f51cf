"""Prompt files, JSON lines or parquet: bad rows reported and skipped, pictures left in the file."""

import dataclasses
import functools
import glob
import json
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmflash_jax.config import FileKind, SamplingSettings
from mmflash_jax.decode.sampling import GREEDY
from mmflash_jax.engine.conversations import split_conversation
from mmflash_jax.engine.image_sources import image_source
from mmflash_jax.engine.images import StoredImage
from mmflash_jax.engine.prompts import Message, PromptError, Request, Source

FIELDS: dict[str, tuple[type, ...]] = {
    "id": (str, int),
    "text": (str,),
    "images": (list,),
    "messages": (list,),
    "conversations": (list,),
    "max_tokens": (int,),
    "stop": (list,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "seed": (int,),
    "answer": (str,),
}

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line or row of a prompt file: a request or the reason why there is none.

    where: file and line number, the beginning of every message about it.
    answer: the expected answer, when the line brings one; no model ever sees it.
    """

    where: str
    id: str
    request: Request | None = None
    answer: str | None = None
    error: str | None = None

    @property
    def question(self) -> str:
        """The text that is to be answered, of a conversation its last turn."""
        if self.request is None or self.request.messages is None:
            return (self.request and self.request.text) or ""
        content = self.request.messages[-1]["content"]
        if isinstance(content, str):
            return content
        return " ".join(part["text"] for part in content if part["type"] == "text")


@dataclass(frozen=True)
class Stored:
    """A line that is still in its file.

    where, number: its place there, numbers from 1.
    read: its value, read anew; ValueError if it is none.
    """

    where: str
    number: int
    read: Callable[[], Any]


def read_requests(
    path: Path,
    *,
    max_tokens: int,
    sampling: SamplingSettings = GREEDY,
    kind: FileKind | None = None,
) -> list[Line]:
    """Every line that is not blank, in order, of all files that `path` names.

    A line holds `text`, with `images` before it, or `messages` (also called `conversations`), whose
    image parts name their picture or take the next one of `images`. An image is a path relative to
    the file, a data URL, base64, or in parquet also bytes or a struct of `bytes` and `path`. Bytes
    are read when the image is opened and not kept. Parquet columns of other names are not read.

    `max_tokens` and `sampling` hold for lines that do not say otherwise. A line without a seed gets
    one of its own, from the seed of `sampling` and the line's number; numbers go on from file to
    file. Without `kind` a file's suffix says what it is.

    Raises:
        FileNotFoundError: there is no such file.
        PromptError: there is no line at all, or a file is no parquet file of prompts.
    """
    lines: list[Line] = []
    before = 0
    for file in prompt_files(path, kind):
        number = 0
        for stored in _stored(file, kind):
            number = stored.number
            lines.append(_parse(stored, before + number, file.parent, max_tokens, sampling))
        before += number
    if not lines:
        raise PromptError(f"{path} holds no prompts")
    return lines


def prompt_files(path: Path, kind: FileKind | None = None) -> list[Path]:
    """A file, the prompt files of a folder or those that a pattern names, in order of their names.

    Raises:
        FileNotFoundError: a folder or a pattern without any.
    """
    suffixes = [".jsonl", ".parquet"] if kind is None else [f".{kind}"]
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in suffixes)
    elif glob.has_magic(str(path)) and not path.exists():
        found = sorted(map(Path, glob.glob(str(path), recursive=True)))
    else:
        return [path]
    if not found:
        raise FileNotFoundError(f"{path}: no {' or '.join(suffixes)} files there")
    return found


def _stored(file: Path, kind: FileKind | None) -> Iterator[Stored]:
    if kind == "parquet" or (kind is None and file.suffix == ".parquet"):
        # Not needed for JSON lines, and slow to import.
        from mmflash_jax.engine.parquet import parquet_rows

        for number, read in parquet_rows(file, tuple(FIELDS)):
            yield Stored(f"{file} row {number}", number, read)
        return
    with file.open("rb") as stream:
        start = 0
        for number, raw in enumerate(stream, start=1):
            if raw.strip():
                yield Stored(
                    f"{file}:{number}", number, functools.partial(_read_json, file, start, len(raw))
                )
            start += len(raw)


def _read_json(file: Path, start: int, size: int) -> Any:
    with file.open("rb") as stream:
        stream.seek(start)
        return _decode(stream.read(size))


def _parse(
    stored: Stored, number: int, folder: Path, max_tokens: int, sampling: SamplingSettings
) -> Line:
    where, line_id = stored.where, str(number)
    try:
        value = stored.read()
        if isinstance(value, dict) and isinstance(value.get("id"), (str, int)):
            line_id = str(value["id"])
        _check(value)
        own = {name: value[name] for name in _SAMPLING if name in value}
        chosen = dataclasses.replace(sampling.of_row(number), **own)
        messages, images = _content(value, folder)
    except ValueError as error:
        return Line(where=where, id=line_id, error=f"{where}: {error}")
    request = Request(
        id=line_id,
        text=value.get("text", "") if messages is None else None,
        messages=messages,
        images=tuple(
            _left_in_file(stored, folder, index) if isinstance(image, bytes) else image
            for index, image in enumerate(images)
        ),
        max_tokens=value.get("max_tokens", max_tokens),
        stop=tuple(value.get("stop", ())),
        sampling=chosen,
    )
    return Line(where=where, id=line_id, request=request, answer=value.get("answer"))


def _content(value: dict[str, Any], folder: Path) -> tuple[list[Message] | None, list[Source]]:
    """The messages of a line, if it has any, and its images in the order of their placeholders."""
    given = value.get("images", [])
    names = [name for name in ("text", "messages", "conversations") if name in value]
    if len(names) > 1:
        raise ValueError(f"a line holds one of {names}, not both")
    if names and names[0] != "text":
        messages, given = split_conversation(value[names[0]], given, names[0])
    else:
        messages = None
    return messages, [image_source(image, folder) for image in given]


def _left_in_file(stored: Stored, folder: Path, index: int) -> StoredImage:
    """Image `index` of a line by its place: the bytes of a data set would not fit in memory."""

    def read() -> bytes:
        image = _content(stored.read(), folder)[1][index]
        assert isinstance(image, bytes)
        return image

    return StoredImage(f"{stored.where}, image {index + 1}", read)


def _decode(raw: bytes) -> Any:
    try:
        value = json.loads(raw.strip())
        # "\\ud800" is JSON, but half a character can be neither tokenised nor written.
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON, {error.msg} at column {error.colno}") from None
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"not valid UTF-8 text, {error.reason}") from None
    except RecursionError:
        raise ValueError("not valid JSON, too deeply nested") from None
    return value


def _check(value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    unknown = sorted(set(value) - set(FIELDS))
    if unknown:
        raise ValueError(f"unknown fields {unknown}; known are {sorted(FIELDS)}")
    for name, item in value.items():
        kinds = FIELDS[name]
        if not isinstance(item, kinds) or isinstance(item, bool):
            raise ValueError(f"{name} is {reprlib.repr(item)}, expected {kinds[0].__name__}")
    bad = [stop for stop in value.get("stop", ()) if not isinstance(stop, str) or not stop]
    if bad:
        raise ValueError(f"stop holds {bad[0]!r}, expected strings that are not empty")
    if value.get("max_tokens", 1) < 1:
        raise ValueError(f"max_tokens is {value['max_tokens']}, it must be at least 1")
