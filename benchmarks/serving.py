"""Load the HTTP server with full-size random checkpoints and compare it with the bare loop.

    python -m benchmarks.full_size make --family qwen35 --folder /tmp/qwen35
    python -m benchmarks.serving --folder /tmp/qwen35 --tau 5.70 --report serving.json

Everything between the socket and the device is what serves: HTTP, events, engine, image tower,
chunked prefill, loop. Clients run in a process of their own. Not real, and labelled so: weights are
random, **acceptance is synthetic** (`benchmarks.acceptance`), and prompts are random tokens around
a picture of noise, since such checkpoints have no tokenizer; each token reads as one letter.

A round is a number of requests at the same moment. `decode_tokens_per_s` is taken while all of them
decode: from the first token of the last one to the end of the first one. It is compared with the
fused loop alone on as many rows, from the same context on, in caches of the same size.
"""

import contextlib
import dataclasses
import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
import uvicorn

from benchmarks.acceptance import SyntheticRule, longest, quantiles
from benchmarks.decode import filled
from benchmarks.full_size import random_prompt
from mmflash_jax.compilation import Lowering, compile_at_once, keep_compiled_programs
from mmflash_jax.config import ServeConfig
from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.records import DecodeState, Plan, Prompt
from mmflash_jax.decode.slots import Shape
from mmflash_jax.evaluation.batch import Session
from mmflash_jax.evaluation.records import commit as commit_here
from mmflash_jax.evaluation.report import describe_device, versions
from mmflash_jax.layers.schema import Params
from mmflash_jax.load import default_dtype, load_drafter, load_target
from mmflash_jax.server.app import Site, make_app
from mmflash_jax.server.start import make_site
from pallas_kernels import Kernels

CHUNK = 512


@dataclass(frozen=True)
class Settings:
    """What to load the server with."""

    folder: Path
    """Where `benchmarks.full_size make` wrote target and draft."""
    tau: float = 5.70
    """Mean of the tokens that a drafted step commits."""
    in_flight: tuple[int, ...] = (1, 8, 32)
    """Requests at once. The server has the most of them as rows, and a program for each number."""
    prompt: int = 1024
    """Prompt tokens, a picture among them."""
    output: int = 512
    """Tokens of an answer."""
    prefill: int = 8192
    """Prompt tokens that the server prefills between two runs of the loop."""
    rounds: int = 3
    """Times that each number of requests is sent, after one round that does not count."""
    kernels: Kernels = "auto"
    commit: str | None = None
    """Commit that the records name. Default: that of this checkout."""
    report: Path | None = None
    """JSON file; other records in it stay."""


class RandomPrompts:
    """Stands where tokenizer and image processor do: every request gets other random tokens."""

    def __init__(self, target: Any, length: int):
        self.target, self._length, self._made = target, length, 0

    def encode(self, request: Any) -> Prompt:
        self._made += 1
        made = random_prompt(self.target, self._length, self._made, self._length + 1)
        return dataclasses.replace(made, sampling=request.sampling)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + id % 26) for id in ids)


@dataclass(frozen=True)
class Bare:
    """The fused loop alone, on caches of the server's size; a run ends before any row does."""

    settings: Settings
    plan: Plan
    params: Params
    capacity: int

    @property
    def steps(self) -> np.int32:
        return np.int32(max(0.8 * self.settings.output / self.settings.tau, 1))

    def state(self, batch: int) -> DecodeState:
        """After prompts of the server's length."""
        room = self.settings.output
        return filled(self.plan, batch, self.capacity, room, self.settings.prompt)

    def compile(self) -> None:
        """The loop for every number of rows."""

        def lowerings() -> Iterator[Lowering]:
            for batch in self.settings.in_flight:
                state = jax.eval_shape(functools.partial(self.state, batch))
                yield functools.partial(decode.lower, self.plan, self.params, state, self.steps)

        compile_at_once(lowerings())
        # So that the server's count of programs stays its own.
        for batch in self.settings.in_flight:
            jax.block_until_ready(self.state(batch))

    def tokens_per_s(self, batch: int) -> float:
        """Median of three runs."""
        found = []
        for _ in range(4):
            state = jax.block_until_ready(self.state(batch))
            before, began = np.asarray(state.num_tokens).sum(), time.perf_counter()
            state = jax.block_until_ready(decode(self.plan, self.params, state, self.steps))
            seconds = time.perf_counter() - began
            found.append((np.asarray(state.num_tokens).sum() - before) / seconds)
        return float(np.median(found[1:]))


@contextlib.contextmanager
def serving(site: Site) -> Iterator[str]:
    """The address of a running server."""
    server = uvicorn.Server(uvicorn.Config(make_app(site), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def load_with(url: str, settings: Settings, count: int) -> list[list[np.ndarray]]:
    """Moments and letters `[events, 2]` of each request of each round but the first."""
    options = {"url": url, "count": count, "output": settings.output, "rounds": settings.rounds + 1}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving_clients"]
        + [part for name, value in options.items() for part in (f"--{name}", str(value))],
        stdout=subprocess.PIPE,
        check=True,
    )
    return [[np.array(events) for events in one] for one in json.loads(done.stdout)[1:]]


def figures(rounds: list[list[np.ndarray]], count: int) -> dict[str, Any]:
    """What clients saw."""
    answers = [events for one in rounds for events in one]
    tokens = sum(events[:, 1].sum() for events in answers)
    seconds = sum(max(events[-1, 0] for events in one) for one in rounds)
    after_first = [(e[-1, 0] - e[0, 0]) / e[1:, 1].sum() for e in answers]
    return {
        "requests": len(answers),
        "tokens": int(tokens),
        "tokens_per_s": round(tokens / seconds, 1),
        "decode_tokens_per_s": decode_rate(rounds),
        "first_token_ms": _spread([1e3 * events[0, 0] for events in answers]),
        "inter_token_ms": _spread([1e3 * value for value in after_first]),
        "events_per_answer": round(sum(map(len, answers)) / len(answers), 1),
        "in_flight": count,
    }


def decode_rate(rounds: list[list[np.ndarray]]) -> float | None:
    """Tokens a second while every request of a round decodes, None if that never lasted.

    Each request's rate is taken from one of its own events to another, so that whole turns of the
    engine count.
    """
    total = 0.0
    for place in range(len(rounds[0])):
        tokens = seconds = 0.0
        for one in rounds:
            begin = max(events[0, 0] for events in one)
            end = min(events[-1, 0] for events in one)
            events = one[place]
            inside = events[(events[:, 0] >= begin) & (events[:, 0] <= end)]
            if len(inside) > 1:
                tokens += inside[1:, 1].sum()
                seconds += inside[-1, 0] - inside[0, 0]
        if not seconds:
            return None
        total += tokens / seconds
    return round(total, 1)


def _spread(values: list[float]) -> dict[str, float]:
    return {
        name: round(float(np.percentile(values, share)), 3)
        for name, share in (("p50", 50), ("p95", 95))
    }


def load(settings: Settings) -> tuple[Plan, Params]:
    target, target_params = load_target(
        settings.folder / "target", default_dtype(), kernels=settings.kernels
    )
    drafter, draft_params = load_drafter(
        settings.folder / "draft", target, default_dtype(), kernels=settings.kernels
    )
    rule = SyntheticRule(quantiles(settings.tau, longest(drafter)))
    params = {"target": target_params, "drafter": draft_params}
    return Plan(target, drafter, (), rule=rule), jax.block_until_ready(params)


def make_server(settings: Settings, plan: Plan, params: Params, alone: Bare) -> Site:
    """A warmed-up server with one program for each load; the bare loops are compiled beside it."""
    rows, block = max(settings.in_flight), plan.drafter.block
    front: Any = RandomPrompts(plan.target, settings.prompt)
    patches = len(random_prompt(plan.target, settings.prompt, 0, alone.capacity).images[0].patches)
    shape = Shape(
        slots=rows,
        capacity=alone.capacity,
        widths=(min(CHUNK, settings.prompt),),
        image_sizes=(-(-patches // 64) * 64,),
        paces=tuple((count, block) for count in sorted(settings.in_flight)),
    )
    config = ServeConfig(target="random", batch=rows, prefill_tokens=settings.prefill)
    with ThreadPoolExecutor(1) as other:
        compiled = other.submit(alone.compile)
        site = make_site(config, Session(plan, params, front), shape)
        compiled.result()
    site.engine.metrics.warmed_up()
    return site


def measure(settings: Settings) -> list[dict[str, Any]]:
    """A record for each load, written as soon as it is known."""
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", flush=True)

    plan, params = load(settings)
    say(f"loaded {type(plan.target).__name__} on {describe_device()}")
    # The front end rounds nothing: a row holds the prompt, the answer and one block.
    capacity = settings.prompt + settings.output + plan.drafter.block
    alone = Bare(settings, plan, params, capacity)
    site = make_server(settings, plan, params, alone)
    say("compiled")
    records = []
    with serving(site) as url:
        for count in settings.in_flight:
            seen = figures(load_with(url, settings, count), count)
            say(f"{count} in flight: {seen['decode_tokens_per_s']} tokens/s")
            loop = alone.tokens_per_s(count)
            say(f"{count} rows in the bare loop: {loop:.1f} tokens/s")
            rate = seen["decode_tokens_per_s"]
            new = site.engine.metrics.registry.get_sample_value
            record = {
                "device": describe_device(), "target": type(plan.target).__name__, **seen,
                "prompt": settings.prompt, "output": settings.output,
                "prefill_tokens": settings.prefill, "weights": "random",
                "acceptance": "synthetic", "asked_tau": settings.tau, "kernels": settings.kernels,
                "dtype": plan.target.dtype, "bare_loop_tokens_per_s": round(loop, 1),
                "lost": None if rate is None else round(1 - rate / loop, 3),
                "compilations_after_warm_up": new("mmflash_compilations_after_warm_up"),
                "versions": versions(), "commit": settings.commit or commit_here(),
            }  # fmt: skip
            print(json.dumps(record), flush=True)
            records.append(record)
            if settings.report:
                write(settings.report, records)
    say("done")
    return records


def write(report: Path, records: list[dict[str, Any]]) -> None:
    """Replace earlier records of the same cells, keep the others."""

    def cell(record: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(record[name] for name in ("device", "target", "kernels", "in_flight"))

    new = {cell(record) for record in records}
    known = json.loads(report.read_text()) if report.exists() else []
    kept = [record for record in known if cell(record) not in new]
    report.write_text(json.dumps([*kept, *records], indent=1) + "\n")


def main() -> int:
    settings = tyro.cli(Settings, description=__doc__)
    keep_compiled_programs()
    measure(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
