"""What a server measures, in Prometheus's terms; names follow vLLM's where it has one."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from mmflash_jax.compilation import compiled_programs

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
TAU = (1, 1.5, 2, 3, 4, 6, 8, 10, 12, 14, 16)


class Measured(Protocol):
    """What a metric needs to know of a request."""

    came: float
    told_at: float
    seen: int
    committed: np.ndarray | None


class Metrics:
    """Counters of one engine, in a registry of their own."""

    def __init__(self, block: int, *, running: Callable[[], int], waiting: Callable[[], int]):
        self.registry = CollectorRegistry()
        self.registry.register(_Device())
        self._block = block
        self._baseline = compiled_programs()

        def make(kind: Any, name: str, text: str, **more: Any) -> Any:
            return kind(f"mmflash_{name}", text, registry=self.registry, **more)

        # Asked when somebody reads them: a turn that takes long does not make them old.
        now = make(Gauge, "requests_running", "Requests in a slot or in prefill.")
        now.set_function(running)
        now = make(Gauge, "requests_waiting", "Requests in the queue.")
        now.set_function(waiting)
        self._finished = make(
            Counter, "requests_finished", "Requests by how they ended.", labelnames=["reason"]
        )
        self._refused = make(
            Counter, "requests_refused", "Requests refused, by HTTP status.", labelnames=["status"]
        )
        self._prompt = make(Counter, "prompt_tokens", "Tokens of prompts prefilled.")
        self._generated = make(Counter, "generation_tokens", "Tokens generated.")
        self._steps = make(Counter, "spec_decode_num_drafts", "Verify steps, summed over requests.")
        self._drafted = make(Counter, "spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = make(Counter, "spec_decode_num_accepted_tokens", "Drafted tokens kept.")
        self._by_place = make(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens kept, by place.",
            labelnames=["position"],
        )  # fmt: skip
        self._first = make(
            Histogram, "time_to_first_token_seconds", "From arrival to the first token.",
            buckets=SECONDS,
        )  # fmt: skip
        self._between = make(
            Histogram, "inter_token_latency_seconds", "Time a token took, of tokens after a first.",
            buckets=BETWEEN,
        )  # fmt: skip
        self._tau = make(
            Histogram, "tau", "Tokens committed per verify step, bonus included, by request turn.",
            buckets=TAU,
        )  # fmt: skip
        self._width = make(Gauge, "draft_width", "Tokens of a block verified in the last turn.")
        self._width_steps = make(
            Counter, "steps_by_draft_width", "Loop steps by tokens verified.", labelnames=["width"]
        )
        new = make(Gauge, "compilations_after_warm_up", "Programs compiled since the warm-up.")
        new.set_function(lambda: compiled_programs() - self._baseline)

    def warmed_up(self) -> None:
        """From here on no program should be compiled."""
        self._baseline = compiled_programs()

    def width(self, width: int, steps: int) -> None:
        """The last turn took `steps` steps that verified `width` tokens of a block."""
        self._width.set(width)
        self._width_steps.labels(width).inc(steps)

    def finished(self, reason: str) -> None:
        self._finished.labels(reason).inc()

    def refused(self, status: int) -> None:
        self._refused.labels(status).inc()

    def prefilled(self, tokens: int) -> None:
        self._prompt.inc(tokens)

    def gained(self, request: Measured, tokens: int, committed: np.ndarray) -> None:
        """A request got `tokens` more; `committed` counts all of its steps so far."""
        now = time.monotonic()
        if tokens:
            self._generated.inc(tokens)
            if not request.seen:
                self._first.observe(now - request.came)
            else:
                for _ in range(tokens):
                    self._between.observe((now - request.told_at) / tokens)
            request.told_at = now
        before = request.committed
        new = committed if before is None else committed - before
        steps = int(new.sum())
        if not steps:
            return
        kept = int(new @ np.arange(len(new)))
        self._steps.inc(steps)
        self._drafted.inc(steps * (self._block - 1))
        self._accepted.inc(kept)
        self._tau.observe(1 + kept / steps)
        # A step that committed n tokens kept the drafts at places 0 .. n - 2.
        at_least = new[::-1].cumsum()[::-1]
        for place, count in enumerate(at_least[1:]):
            self._by_place.labels(place).inc(int(count))


class _Device(Collector):
    """Memory of the first device, where it tells."""

    def collect(self):
        stats = jax.local_devices()[0].memory_stats() or {}
        for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit"):
            if name in stats:
                yield GaugeMetricFamily(f"mmflash_device_{name}", "Device memory.", stats[name])
