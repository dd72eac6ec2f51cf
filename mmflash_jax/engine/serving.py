"""The serving engine: requests join and leave a running batch between short loop runs.

One thread owns the device state. Each turn it drops what was cancelled, prefills a bounded number
of prompt tokens (so that a long prompt holds up the others by so many at a time), starts the fused
loop for a few steps and tells every request what it gained: while the device is at the next steps
already, if no prompt waits. Requests are admitted in the order in which they came.
"""

import collections
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mmflash_jax.compilation import compile_at_once
from mmflash_jax.decode.records import (
    FINISH_REASONS,
    DecodeState,
    PatchedImage,
    Plan,
    Prompt,
)
from mmflash_jax.decode.slots import Emission, Pieces, Shape, empty_slots, insert, release, run
from mmflash_jax.engine.metrics import Metrics
from mmflash_jax.engine.offline import Timing
from mmflash_jax.engine.pace import Pace
from mmflash_jax.engine.programs import blank_prompts, large_programs
from mmflash_jax.engine.telling import fail, tell, to_host
from mmflash_jax.engine.tickets import BusyError, RefusedError, Ticket, Update
from mmflash_jax.layers.schema import Params

log = logging.getLogger(__name__)

LAST_TURN_S = 30.0
"""Seconds that a turn may still take when the engine is told to end."""
SHORT_RUN = 4
"""Verify steps between two pieces of a prompt, and the fewest that a run is given."""
PREFILLS_AT_ONCE = 2
"""Prompts that are prefilled in turns: a short one overtakes a long one that came before it."""


@dataclass(eq=False)
class _Prefill:
    ticket: Ticket
    pieces: Iterator[tuple[int, DecodeState | None]]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run of the loop: what it tells, and whom of.

    began: when, if the device had nothing else to do before; None if it follows another run.
    """

    given: Future[tuple[DecodeState, Emission]]
    tickets: tuple[Ticket | None, ...]
    width: int
    began: float | None


class Engine:
    """Slots over the fused loop. `submit` and `cancel` may be called from any thread."""

    def __init__(
        self,
        plan: Plan,
        params: Params,
        shape: Shape,
        *,
        queue: int = 64,
        prefill: int = 2048,
        run_s: float | None = None,
    ):
        self.plan, self.params, self.shape, self.queue = plan, params, shape, queue
        self._prefill_tokens, self._run_s = prefill, run_s
        self.metrics = Metrics(
            plan.drafter.block, running=lambda: self.occupied, waiting=lambda: self.waiting
        )
        self.failure: BaseException | None = None
        self.beat = time.monotonic()
        self._paces = shape.paces or ((shape.slots, plan.drafter.block),)
        self._pace = Pace(self._paces, plan.drafter.block)
        self.timing = Timing()
        self._last: _Run | None = None
        self._told_at = 0.0
        self._pieces = Pieces.of(plan, params, shape)
        self._state = empty_slots(plan, shape)
        self._slots: list[Ticket | None] = [None] * shape.slots
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._prefills: collections.deque[_Prefill] = collections.deque()
        self._changed = threading.Condition()
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)

    def warm_up(self, image: PatchedImage | None = None) -> None:
        """Compile every program that requests can need; `image` shows the width of patches.

        Call it before `start`.
        """
        channels = 0 if image is None else image.patches.shape[1]
        # The large ones side by side; what is left is small and compiled by its first use below.
        compile_at_once(large_programs(self._pieces, self._state, self._paces, channels))
        for prompt in blank_prompts(self.plan, self.shape, channels):
            for _, row in self._pieces.prefill(prompt):
                if row is not None:
                    self._state = insert(self.plan, self._state, row, np.int32(0))
            self._free([0])
        for rows, width in self._paces:
            self._state, _ = self._run(rows, width, 0)
        jax.block_until_ready(self._state)
        self.metrics.warmed_up()

    # ---- from any thread

    def start(self) -> None:
        self._thread.start()

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt that no free engine could answer either.

        Raises:
            RefusedError: with the numbers.
        """
        length, wanted, most = len(prompt.ids), prompt.max_tokens, self.shape.capacity
        if length + wanted > most:
            raise RefusedError(
                f"the prompt has {length} tokens and up to {wanted} more are asked for, "
                f"{length + wanted} in all; a row holds {most}"
            )
        largest = max(self.shape.image_sizes, default=0)
        for place, image in enumerate(prompt.images, start=1):
            if len(image.patches) > largest:
                raise RefusedError(
                    f"image {place} has {len(image.patches)} patches, at most {largest} are served"
                )

    def submit(self, prompt: Prompt, deliver: Callable[[Update], object]) -> Ticket:
        """Queue a prompt. `deliver` gets updates until one has a finish reason, then no more.

        Raises:
            RefusedError: it can never be answered here.
            BusyError: the queue is full, or the engine is going down.
        """
        self.check(prompt)
        ticket = Ticket(prompt, deliver)
        with self._changed:
            if self._closing or self._ended:
                raise BusyError("the server is shutting down")
            if len(self._waiting) >= self.queue:
                raise BusyError(f"{len(self._waiting)} requests wait already, the queue is full")
            if not (self._waiting or self.occupied):
                # The silence of an idle loop is none of a loop that hangs.
                self.beat = time.monotonic()
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket, why: str = "cancelled") -> None:
        """Forget a request: it leaves the queue or its slot before the next run.

        `why` is what metrics count it as.
        """
        with self._changed:
            ticket.cancelled, ticket.why = True, why
            self._changed.notify()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def occupied(self) -> int:
        """Slots that are in use or spoken for."""
        # In this order, since a request goes from prefill to its slot meanwhile: it may count twice
        # for a moment, but never not at all.
        prefills = len(self._prefills)
        return prefills + sum(ticket is not None for ticket in self._slots)

    def stuck(self, after_s: float) -> str | None:
        """Why the loop does not advance, None if it does or has nothing to do."""
        if self.failure is not None:
            return f"the engine failed: {self.failure}"
        if not self._thread.is_alive():
            return "the engine is not running"
        # The queue first, since a request goes from it to a prefill meanwhile.
        idle = not (self._waiting or self.occupied)
        silent = time.monotonic() - self.beat
        if idle or silent < after_s:
            return None
        return f"the engine has not finished a turn for {silent:.0f} s"

    def stop(self, patience_s: float = 0.0) -> None:
        """Take no more requests, finish those that are here within `patience_s`, end the rest."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(patience_s)
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(LAST_TURN_S)
        if self._thread.is_alive():
            log.error("the engine's loop hangs and is left behind")

    # ---- in the engine's thread

    def _serve(self) -> None:
        try:
            while self._wait_for_work():
                self._turn()
            self._end_all("the server is shutting down")
        except BaseException as error:
            log.exception("the engine failed")
            self.failure = error
            with self._changed:
                self._ended = True
            self._end_all(f"the engine failed: {type(error).__name__}")

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False if the engine should end."""
        with self._changed:
            while True:
                self.beat = time.monotonic()
                if self._ended:
                    return False
                if self._waiting or self.occupied:
                    return True
                if self._closing:
                    return False
                self._changed.wait()

    def _turn(self) -> None:
        if self._last is not None and self._will_prefill(self._last):
            # Rows that have ended make room first, and no tokens wait until a prompt is prefilled.
            last, self._last = self._last, None
            self._free(self._hand_out(last))
        self._drop_cancelled()
        self._begin_prefills()
        prefilled = bool(self._prefills)
        self._prefill(self._prefill_tokens)
        following = self._next_run(prefilled) if any(self._slots) else None
        last, self._last = self._last, following
        # The device is at the next run already. Rows that turn out to have ended stand still in
        # it, and what it tells of them is not told again.
        ended = [] if last is None else self._hand_out(last)
        if self._last is not None:
            self._state = self._last.given.result()[0]
        self._free(ended)
        if not any(self._slots):
            self._last = None

    def _will_prefill(self, last: _Run) -> bool:
        """Whether a prompt is on its way in, or waits and finds room after the last run."""
        if self._prefills or not self._waiting:
            return bool(self._prefills)
        reasons = np.asarray(last.given.result()[1].reason)
        return self.occupied < self.shape.slots or any(
            ticket is not None and int(reason) in FINISH_REASONS
            for ticket, reason in zip(last.tickets, reasons, strict=True)
        )

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = [t for t in self._waiting if t.cancelled]
            self._waiting = collections.deque(t for t in self._waiting if not t.cancelled)
        gone += [p.ticket for p in self._prefills if p.ticket.cancelled]
        self._prefills = collections.deque(p for p in self._prefills if not p.ticket.cancelled)
        held = {slot: t for slot, t in enumerate(self._slots) if t is not None and t.cancelled}
        self._free(list(held))
        for ticket in (*gone, *held.values()):
            self.metrics.finished(ticket.why)

    def _begin_prefills(self) -> None:
        with self._changed:
            while (
                self._waiting
                and len(self._prefills) < PREFILLS_AT_ONCE
                and self.occupied < self.shape.slots
            ):
                ticket = self._waiting[0]
                self._prefills.append(_Prefill(ticket, self._pieces.prefill(ticket.prompt)))
                self._waiting.popleft()

    def _prefill(self, tokens: int) -> None:
        """Work on prompts in turns, one piece each, until about `tokens` are done."""
        while self._prefills and tokens > 0:
            # It stays in the queue meanwhile: others ask whether the engine is at work.
            one = self._prefills[0]
            try:
                done, row = next(one.pieces)
            except Exception as error:
                # Nothing of the running state was touched: the others go on.
                log.exception("a prompt failed")
                self._prefills.popleft()
                fail(one.ticket, self.metrics, f"the prompt failed: {type(error).__name__}")
                self._begin_prefills()
                continue
            tokens -= done
            if row is None:
                self._prefills.rotate(-1)
                continue
            self.metrics.prefilled(len(one.ticket.prompt.ids))
            slot = self._slots.index(None)
            # First, so that a failure below finds the request and tells it.
            self._slots[slot] = one.ticket
            self._prefills.popleft()
            self._state = insert(self.plan, self._state, row, np.int32(slot))
            self._begin_prefills()

    def _next_run(self, prefilled: bool) -> _Run:
        rows = self._pace.rows(1 + max(slot for slot, t in enumerate(self._slots) if t))
        width = self._pace.width(rows)
        began = None
        if prefilled or self._last is None:
            # The clock sees decoding only.
            jax.block_until_ready(self._state)
            began = time.perf_counter()
        budget = self._budget(rows, width)
        return _Run(
            given=_in_background(functools.partial(self._run, rows, width, budget)),
            tickets=tuple(self._slots[:rows]),
            width=width,
            began=began,
        )

    def _budget(self, rows: int, width: int) -> int:
        """Verify steps of the next run: each run costs the host some milliseconds, but what comes
        in meanwhile waits for its end."""
        most = self.shape.steps
        if self._run_s is None:
            return most
        seconds = self._pace.seconds(rows, width)
        if self._prefills or seconds is None:
            return min(SHORT_RUN, most)
        return min(max(SHORT_RUN, int(self._run_s / seconds)), most)

    def _run(self, rows: int, width: int, budget: int) -> tuple[DecodeState, Emission]:
        return run(
            self.plan, self.params, self._state, np.int32(budget), steps=self.shape.steps,
            rows=rows, width=width,
        )  # fmt: skip

    def _hand_out(self, last: _Run) -> list[int]:
        """Tell the requests of a run what they gained; the slots of those that ended."""
        emission = last.given.result()[1]
        told = to_host(emission, any(t and t.prompt.logprobs for t in last.tickets))
        now = time.perf_counter()
        elapsed = now - (self._told_at if last.began is None else last.began)
        self._told_at = now
        ended, steps, committed = [], 0, np.zeros(self.plan.drafter.block, np.int64)
        for slot, ticket in enumerate(last.tickets):
            # Since then a request may have ended or been cancelled.
            if ticket is None or self._slots[slot] is not ticket:
                continue
            before = ticket.committed
            if tell(ticket, slot, told, self.metrics):
                # At once: if the next run fails, whoever waits is told, and this one has its end.
                self._slots[slot] = None
                ended.append(slot)
            new = told.committed[slot] - (0 if before is None else before)
            committed += new
            steps = max(steps, int(new.sum()))
        pace = len(last.tickets), last.width
        self._pace.observe(*pace, committed, elapsed / steps if steps else None)
        self.timing.decode_s += elapsed
        self.timing.tokens += int(committed @ (1 + np.arange(len(committed))))
        self.metrics.width(last.width, steps)
        return ended

    def _free(self, slots: list[int]) -> None:
        if not slots:
            return
        mask = np.zeros(self.shape.slots, bool)
        mask[slots] = True
        self._state = release(self._state, mask)
        for slot in slots:
            self._slots[slot] = None

    def _end_all(self, why: str) -> None:
        with self._changed:
            tickets = [*self._slots, *(p.ticket for p in self._prefills), *self._waiting]
            self._slots = [None] * self.shape.slots
            self._prefills.clear()
            self._waiting.clear()
        for ticket in tickets:
            if ticket is not None and not ticket.cancelled:
                fail(ticket, self.metrics, why)


def _in_background(call: Callable[[], Any]) -> Future[Any]:
    """What `call` gives, from another thread: on a GPU the call of a loop returns with its end."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="run", daemon=True).start()
    return future
