"""Settings from YAML files and flags of the command line, into the dataclasses of `config*.py`."""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from mmflash_jax.weights.hf_config import ConfigError

T = TypeVar("T")


def find_config(name: str) -> Path:
    """A config file by path, or by bare name in `configs/` beside the scripts.

    Raises:
        ConfigError: it is in neither place.
    """
    beside = Path(__file__).parent.parent / "configs" / name
    for path in (Path(name), beside):
        if path.is_file():
            return path
    known = sorted(p.name for p in beside.parent.glob("*.yaml"))
    raise ConfigError(f"no config {name!r}; configs/ holds {', '.join(known) or 'none'}")


def read_yaml(path: Path, kind: type[T], flags: Sequence[str] = ()) -> T:
    """Build the dataclass `kind` from a YAML file and the flags that override it, strictly.

    `flags` are command-line arguments such as `--optimiser.steps 100`; values are written as in
    the file.

    Raises:
        ConfigError: unknown, missing or ill-typed fields, by file and dotted name.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    for name, value in _read_flags(flags):
        _override(values, name, value)
    try:
        return build(kind, values, "")
    except ConfigError as error:
        source = f"{path} with {' '.join(flags)}" if flags else path
        raise ConfigError(f"{source}: {error}") from None


def _read_flags(flags: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of `--name value` and `--name=value`."""
    rest = list(flags)
    while rest:
        flag, joined, text = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"unexpected argument {flag!r}")
        if not joined:
            if not rest:
                raise ConfigError(f"{flag} has no value")
            text = rest.pop(0)
        try:
            yield flag[2:].replace("-", "_"), yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"{flag} is {text!r}, which is not valid YAML") from None


def _override(values: Any, name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for at, parent in enumerate(parents):
        inner = values.setdefault(parent, {}) if isinstance(values, dict) else None
        if not isinstance(inner, dict):
            raise ConfigError(f"--{name}: {'.'.join(parents[: at + 1])} is {inner!r}, no mapping")
        values = inner
    if isinstance(values, dict):
        values[last] = value


def as_values(config: Any) -> Any:
    """What `build` makes `config` of again: dicts, lists and scalars, every field written out."""
    if dataclasses.is_dataclass(config):
        return {f.name: as_values(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, tuple):
        return [as_values(item) for item in config]
    return str(config) if isinstance(config, Path) else config


def build(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`: dataclasses, unions of them (by `kind`; without one it is the option whose
    class says that it is `implied`), tuples, literals and scalars.

    `where` is the dotted name of the value, empty for the whole file.
    """
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        return _build_union(typing.get_args(kind), value, where)
    if origin is Literal:
        if value not in typing.get_args(kind):
            raise ConfigError(f"{where} is {value!r}, allowed: {list(typing.get_args(kind))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} is {value!r}, expected a list")
        inner = typing.get_args(kind)[0]
        return tuple(build(inner, item, f"{where}[{i}]") for i, item in enumerate(value))
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        # YAML 1.1 reads 6e-4 as a string.
        try:
            if math.isfinite(float(value)):
                return float(value)
        except (ValueError, OverflowError):
            pass
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{where} is {value!r}, expected {kind.__name__}")


def _build_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        name = where or "the file"
        raise ConfigError(f"{name} is {value!r}, expected a mapping for {kind.__name__}")
    prefix = f"{where}." if where else ""
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = [f"{prefix}{name}" for name in value if name not in fields]
    if unknown:
        raise ConfigError(f"unknown fields {unknown}; known are {sorted(fields)}")
    missing = [
        f"{prefix}{name}"
        for name, f in fields.items()
        if name not in value
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"missing fields {missing}")
    built = {name: build(hints[name], item, prefix + name) for name, item in value.items()}
    try:
        return kind(**built)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def _build_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    if len(options) == 1:
        return build(options[0], value, where)
    by_kind = {
        kind: option
        for option in options
        for kind in typing.get_args(typing.get_type_hints(option)["kind"])
    }
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind is None:
        kind = next((k for k, option in by_kind.items() if getattr(option, "implied", False)), None)
    if kind not in by_kind:
        raise ConfigError(f"{where}.kind is {kind!r}, allowed: {sorted(by_kind)}")
    return build(by_kind[kind], value, where)
