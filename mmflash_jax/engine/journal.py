"""A file of JSON lines that a killed run goes on writing where it stopped.

The first line names every setting that the others depend on. A file of other settings is refused
and left alone: reusing it silently would train on the wrong thing, overwriting it would throw hours
away.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmflash_jax.weights.hf_config import ConfigError


@dataclass(frozen=True)
class Journal:
    """Lines at `path` under a header.

    remedy: what to do about a file that is refused, the end of the message.
    """

    path: Path
    header: Mapping[str, Any]
    remedy: str

    def read(self) -> list[Any]:
        """All whole lines after the header; none when there is no file yet.

        A last line without its end is what a kill leaves and is dropped.

        Raises:
            ConfigError: the header has another value somewhere, or a line is no JSON.
        """
        lines = self._whole_lines()
        if not lines:
            return []
        self._check(self._parse(lines[0], 1))
        return [self._parse(line, number) for number, line in enumerate(lines[1:], start=2)]

    @contextlib.contextmanager
    def append(self, keep: int) -> Iterator[Callable[[Iterable[Any]], None]]:
        """Gives a function that writes lines after the first `keep`; later ones are cut off.

        What it has written survives a kill of the process.
        """
        lines = self._whole_lines()
        if not lines:
            self.path.write_bytes(_line(self.header))
        else:
            with self.path.open("r+b") as stream:
                stream.truncate(sum(len(line) + 1 for line in lines[: keep + 1]))
        with self.path.open("ab") as stream:

            def write(values: Iterable[Any]) -> None:
                stream.write(b"".join(_line(value) for value in values))
                stream.flush()

            yield write

    def refuse(self, name: str, there: Any, here: Any) -> ConfigError:
        """The error for a file whose `name` differs from the config's."""
        return ConfigError(
            f"{self.path} was made with other settings: {name} is {there!r} there and {here!r} in "
            f"the config; remove the file to {self.remedy}"
        )

    def _whole_lines(self) -> list[bytes]:
        if not self.path.exists():
            return []
        *lines, rest = self.path.read_bytes().split(b"\n")
        if not lines and not _line(self.header).startswith(rest):
            raise self.refuse("header", rest[:80].decode(errors="replace"), dict(self.header))
        return lines

    def _check(self, stored: Any) -> None:
        here = json.loads(_line(self.header))
        if not isinstance(stored, dict):
            raise self.refuse("header", stored, here)
        for name in [*here, *stored]:
            if stored.get(name) != here.get(name):
                raise self.refuse(name, stored.get(name), here.get(name))

    def _parse(self, line: bytes, number: int) -> Any:
        try:
            return json.loads(line)
        except ValueError:
            raise ConfigError(
                f"{self.path}:{number} is damaged; remove the file to {self.remedy}"
            ) from None


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"
