"""Keeping compiled programs between runs."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

Lowering = Callable[[], jax.stages.Lowered]
"""Gives `jitted.lower(...)`."""


def keep_compiled_programs() -> None:
    """Store compiled programs under the user's cache folder, so that a second start is quick."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    jax.config.update("jax_compilation_cache_dir", str(cache / "mmflash-jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def compile_at_once(lowerings: Iterable[Lowering]) -> None:
    """Compile programs side by side, one for two cores.

    XLA itself uses several threads a program: with two cores more than one program at a time took a
    quarter longer in all. A later call of the jitted function with arguments of these shapes finds
    its program compiled.
    """
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        for _ in pool.map(lambda lower: lower().compile(), lowerings):
            pass


_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_programs = 0


def _count(event: str, duration_secs: float, **_: str | int) -> None:  # noqa: ARG001
    global _programs
    _programs += event == _COMPILE_EVENT


jax.monitoring.register_event_duration_secs_listener(_count)


def compiled_programs() -> int:
    """Programs that this process has compiled, or read from the cache, since this import."""
    return _programs
