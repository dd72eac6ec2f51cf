"""What the serving engine and its callers hand each other."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mmflash_jax.decode.records import Prompt


class RefusedError(ValueError):
    """A request that can never be answered here; the message has the numbers."""


class BusyError(RuntimeError):
    """The queue is full or the engine is going down: the same request may succeed later."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Of one token, in nats: its own log-probability and the likeliest tokens', likeliest first."""

    chosen: float
    ids: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a run of the loop added to a request.

    ids: new tokens. drafted: which of them are accepted drafts. logprobs: one for each of them if
        the request asks for them.
    finish_reason: "stop" or "length" with the last update, "error" if there will be no more.
    steps, committed: of the whole request so far (`DecodeState`).
    """

    ids: tuple[int, ...] = ()
    drafted: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    steps: int = 0
    committed: tuple[int, ...] = ()


@dataclass(eq=False)
class Ticket:
    """One request inside the engine; `deliver` is called in the engine's thread."""

    prompt: Prompt
    deliver: Callable[[Update], object]
    came: float = field(default_factory=time.monotonic)
    told_at: float = 0.0
    seen: int = 0
    committed: np.ndarray | None = None
    cancelled: bool = False
    why: str = "cancelled"
