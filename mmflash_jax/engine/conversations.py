"""Conversations of data sets as chat messages to be answered.

Two spellings are common: `{"role", "content"}`, whose content is text or a list of parts, and
LLaVA's `{"from": "human", "value": "<image>..."}`. In text, `<image>` stands for a picture.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from mmflash_jax.engine.prompts import Message

MARK = "<image>"
_ROLES = {"human": "user", "gpt": "assistant"}
# Where transformers, TRL and OpenAI's API put the picture of a part.
_PICTURE = ("image", "path", "url", "base64", "bytes", "image_url")


def split_conversation(
    turns: Sequence[Any], images: Sequence[Any], name: str
) -> tuple[list[Message], list[Any]]:
    """Messages in the chat template's form, and their pictures in order.

    What follows the last user turn is left out: the model answers that turn itself; earlier answers
    stay as context. A picture part that names no picture takes the next of `images`, or the one at
    its `index`. If no turn has a place for a picture, `images` stand before the first user turn.
    `name` is the field's, for errors.

    Raises:
        ValueError: no user turn, a turn or part of another form, or images without a place.
    """
    turns = [_turn(turn, f"{name}[{index}]") for index, turn in enumerate(turns)]
    users = [index for index, (role, _) in enumerate(turns) if role == "user"]
    if not users:
        raise ValueError(f"{name} has no user turn to answer")
    turns = turns[: users[-1] + 1]
    parts = [
        _parts(content, f"{name}[{index}]", marked=bool(images) and role == "user")
        for index, (role, content) in enumerate(turns)
    ]
    if images and not any(part["type"] == "image" for each in parts for part in each):
        parts[users[0]] = [*({"type": "image"} for _ in images), *parts[users[0]]]
    placed = _place([part for each in parts for part in each], images, name)
    return [
        {"role": role, "content": _content(content, each)}
        for (role, content), each in zip(turns, parts, strict=True)
    ], placed


def _turn(turn: Any, where: str) -> tuple[str, Any]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"{where} is {reprlib.repr(turn)}, expected a role and a content")
    role, content = turn.get("role"), turn.get("content")
    if role is None and content is None:
        role, content = _ROLES.get(str(turn.get("from")), turn.get("from")), turn.get("value")
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise ValueError(
            f"{where} has the fields {sorted(turn)}, expected a role and, as content, text or parts"
        )
    return role, content


def _content(given: str | list[Any], parts: Sequence[dict[str, Any]]) -> str | list[Message]:
    """What the template gets: text as it was given, or parts without anything but their text."""
    if isinstance(given, str) and all(part["type"] == "text" for part in parts):
        return given
    return [
        {"type": "image"} if part["type"] == "image" else {"type": "text", "text": part["text"]}
        for part in parts
    ]


def _parts(content: str | list[Any], where: str, *, marked: bool) -> list[dict[str, Any]]:
    """Parts without empty fields; text is cut at its marks where pictures may stand."""
    if isinstance(content, list):
        return [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    pieces = content.split(MARK) if marked else [content]
    made: list[dict[str, Any]] = []
    for index, piece in enumerate(pieces):
        if index:
            made.append({"type": "image"})
        if piece or len(pieces) == 1:
            made.append({"type": "text", "text": piece})
    return made


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise ValueError(f"{where} is {reprlib.repr(part)}, expected an object with a type")
    # Rows of a parquet column share their fields; those of other parts are null.
    kept = {name: value for name, value in part.items() if value is not None}
    if kept.get("type") == "image_url":
        kept["type"] = "image"
    if kept.get("type") == "image" or (
        kept.get("type") == "text" and isinstance(kept.get("text"), str)
    ):
        return kept
    raise ValueError(f"{where} is of type {kept.get('type')!r}; text and image are supported")


def _place(parts: Sequence[dict[str, Any]], images: Sequence[Any], name: str) -> list[Any]:
    placed, taken = [], 0
    for part in parts:
        if part["type"] != "image":
            continue
        own = next((part[key] for key in _PICTURE if key in part), None)
        if own is not None:
            placed.append(own["url"] if isinstance(own, Mapping) and "url" in own else own)
            continue
        index = part.get("index", taken)
        if not isinstance(index, int) or not 0 <= index < len(images):
            raise ValueError(f"{name} asks for image {index + 1}, images holds {len(images)}")
        placed.append(images[index])
        taken += 1
    if taken != len(images):
        raise ValueError(f"{name} has places for {taken} of the {len(images)} in images")
    return placed
