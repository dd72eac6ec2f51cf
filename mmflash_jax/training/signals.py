"""SIGTERM and Ctrl-C: finish the step, save, then stop."""

import os
import signal
import threading
from types import FrameType
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While this context is open, the first signal is kept in `signal`; a second ends the process.

    Signals reach the main thread only. In any other thread, where handlers cannot be set, nothing
    changes.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            # At once: no clean-up that could wait for the device or the disk.
            os._exit(128 + number)
        self.signal = signal.Signals(number)
