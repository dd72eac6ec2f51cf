"""Reading a checkpoint's `config.json` without silent defaults."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A configuration field is missing, contradictory or not supported."""


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ConfigError: the file is missing or holds no JSON object.
    """
    path = Path(path)
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def require(config: Mapping[str, Any], name: str, where: str) -> Any:
    """The value of a field that has no safe default."""
    if config.get(name) is None:
        raise ConfigError(f"{where} lacks {name!r}, which has no safe default")
    return config[name]


def expect(config: Mapping[str, Any], where: str, **supported: Iterable[Any]) -> None:
    """Refuse a present field whose value is not implemented."""
    for name, values in supported.items():
        allowed = list(values)
        if name in config and config[name] not in allowed:
            raise ConfigError(f"{where}: {name} is {config[name]!r}, supported: {allowed}")


def rope_theta(config: Mapping[str, Any], where: str) -> float:
    """The rotary base, which configs keep at top level, in `rope_parameters` or in both.

    Raises:
        ConfigError: it is nowhere, the two places disagree, or a scaling is asked for.
    """
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"{where}: rope_type is {kind!r}, supported: ['default']")
    found = {config.get("rope_theta"), nested.get("rope_theta")} - {None}
    if not found:
        raise ConfigError(f"{where} lacks 'rope_theta' (top level or in rope_parameters)")
    if len(found) > 1:
        raise ConfigError(
            f"{where}: rope_theta is {config['rope_theta']} at top level but "
            f"{nested['rope_theta']} in rope_parameters; keep one"
        )
    return float(found.pop())


def mrope(text: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope_theta`, `rotary_dim` and `mrope_section` of Qwen3.5's interleaved M-RoPE.

    Raises:
        ConfigError: one is missing, or they contradict each other.
    """
    rope = require(text, "rope_parameters", where)
    inside = f"{where} rope_parameters"
    rotary = int(require(text, "head_dim", where) * rope.get("partial_rotary_factor", 0.25))
    section = tuple(require(rope, "mrope_section", inside))
    if len(section) != 3 or sum(section) != rotary // 2:
        raise ConfigError(
            f"{where}: mrope_section {list(section)} must be three numbers whose sum is half "
            f"the rotary width, {rotary // 2}"
        )
    expect(rope, inside, mrope_interleaved=[True])
    return {
        "rope_theta": rope_theta(text, where),
        "rotary_dim": rotary,
        "mrope_section": section,
    }


def refuse_foreign_rotary(config: Mapping[str, Any], where: str) -> None:
    """A draft rotates whole heads by token index; a target's rotary keys would change that.

    Raises:
        ConfigError: such a key was left in the draft's config.
    """
    places = (config.get("rope_parameters"), config.get("rope_scaling"), config)
    harmless = {"partial_rotary_factor": 1.0, "mrope_section": None, "mrope_interleaved": False}
    for name, neutral in harmless.items():
        for value in (place.get(name) for place in places if place):
            if value not in (None, neutral):
                raise ConfigError(
                    f"{where}: {name} is {value!r}, but this draft uses plain 1-D rotary "
                    "positions over the whole head; it was copied from the target, remove it"
                )
