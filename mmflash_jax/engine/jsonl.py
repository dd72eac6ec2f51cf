"""Prompt files: one JSON object a line, bad lines reported and skipped."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmflash_jax.decode.sampling import GREEDY, SamplingSettings
from mmflash_jax.engine.prompts import PromptError, Request

_FIELDS = {
    "id": (str, int),
    "text": (str,),
    "images": (list,),
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
    """One line of a prompt file: a request or the reason why there is none.

    where: file and line number, the beginning of every message about it.
    answer: the expected answer, when the line brings one; no model ever sees it.
    """

    where: str
    id: str
    request: Request | None = None
    answer: str | None = None
    error: str | None = None


def read_requests(
    path: Path, *, max_tokens: int, sampling: SamplingSettings = GREEDY
) -> list[Line]:
    """Every line that is not blank, in order. Image paths are relative to the file.

    `max_tokens` and `sampling` hold for lines that do not say otherwise. A line without a seed gets
    one of its own, from the seed of `sampling` and the line's number.

    Raises:
        FileNotFoundError: there is no such file.
        PromptError: it holds no line at all.
    """
    lines = []
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if raw.strip():
                lines.append(_parse(raw, path, number, max_tokens, sampling))
    if not lines:
        raise PromptError(f"{path} holds no prompts")
    return lines


def _parse(
    raw: bytes, path: Path, number: int, max_tokens: int, sampling: SamplingSettings
) -> Line:
    where, line_id = f"{path}:{number}", str(number)
    try:
        value = _decode(raw)
        if isinstance(value, dict) and isinstance(value.get("id"), (str, int)):
            line_id = str(value["id"])
        _check(value)
        own = {"seed": ((sampling.seed << 32) + number) % 2**64}
        own |= {name: value[name] for name in _SAMPLING if name in value}
        chosen = dataclasses.replace(sampling, **own)
    except ValueError as error:
        return Line(where=where, id=line_id, error=f"{where}: {error}")
    request = Request(
        id=line_id,
        text=value.get("text", ""),
        images=tuple(path.parent / name for name in value.get("images", ())),
        max_tokens=value.get("max_tokens", max_tokens),
        stop=tuple(value.get("stop", ())),
        sampling=chosen,
    )
    return Line(where=where, id=line_id, request=request, answer=value.get("answer"))


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
    unknown = sorted(set(value) - set(_FIELDS))
    if unknown:
        raise ValueError(f"unknown fields {unknown}; known are {sorted(_FIELDS)}")
    for name, item in value.items():
        kinds = _FIELDS[name]
        if not isinstance(item, kinds) or isinstance(item, bool):
            raise ValueError(f"{name} is {item!r}, expected {kinds[0].__name__}")
    bad = [name for name in value.get("images", ()) if not isinstance(name, str)]
    if bad:
        raise ValueError(f"images holds {bad[0]!r}, expected file names")
    bad = [stop for stop in value.get("stop", ()) if not isinstance(stop, str) or not stop]
    if bad:
        raise ValueError(f"stop holds {bad[0]!r}, expected strings that are not empty")
    if value.get("max_tokens", 1) < 1:
        raise ValueError(f"max_tokens is {value['max_tokens']}, it must be at least 1")
