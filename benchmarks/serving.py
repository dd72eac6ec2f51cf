"""Load the HTTP server with full-size random checkpoints and compare it with the bare loop.

    python -m benchmarks.full_size make --family qwen35 --folder /tmp/qwen35
    python -m benchmarks.serving --folder /tmp/qwen35 --tau 5.70 --report serving.json

Everything between the socket and the device is what serves: HTTP, events, engine, image tower,
chunked prefill, loop. Clients run in a process of their own. Not real, and labelled so: weights are
random, **acceptance is synthetic** (`benchmarks.decode`), and prompts are random tokens around a
picture of noise, since such checkpoints have no tokenizer; each token reads as one letter.
"""

import asyncio
import dataclasses
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import tyro
import uvicorn

from benchmarks import decode as bare
from benchmarks.full_size import random_prompt
from mmflash_jax.config import ServeConfig
from mmflash_jax.decode.records import Acceptance, DecodeState, Plan, Prompt, Verification
from mmflash_jax.drafters import Proposal
from mmflash_jax.evaluation.batch import Session
from mmflash_jax.evaluation.report import describe_device, versions
from mmflash_jax.load import default_dtype, load_drafter, load_target
from mmflash_jax.server.app import make_app
from mmflash_jax.server.start import make_site


@dataclass(frozen=True)
class Settings:
    """What to load the server with."""

    folder: Path
    """Where `benchmarks.full_size make` wrote target and draft."""
    tau: float = 5.70
    """Mean of the tokens that a drafted step commits."""
    in_flight: tuple[int, ...] = (1, 8, 32)
    """Requests at once; the server has as many rows."""
    prompt: int = 1024
    """Prompt tokens, a picture among them."""
    output: int = 512
    """Tokens of an answer."""
    rounds: int = 3
    """Requests of each client, one after another."""
    kernels: bare.Kernels = "auto"
    adapt: bool = False
    """Let the server choose rows and widths by load."""
    report: Path | None = None


@dataclass(frozen=True)
class SyntheticRule:
    """`benchmarks.decode.synthetic` with its counts, also for blocks verified in part."""

    counts: tuple[int, ...]

    def __call__(
        self,
        state: DecodeState,
        proposal: Proposal,
        verification: Verification,
        stop_ids: tuple[int, ...],
    ) -> Acceptance:
        width = verification.logits.shape[1]
        counts = tuple(min(count, width) for count in self.counts)
        return bare.synthetic(counts, state, proposal, verification, stop_ids)


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


async def client(url: str, output: int, rounds: int) -> list[dict[str, float]]:
    """Requests one after another: time to the first token, seconds a token after it."""
    body = {
        "model": "random",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": output,
        "stream": True,
    }
    measured = []
    async with httpx2.AsyncClient(timeout=None) as http:
        for _ in range(rounds):
            began, first, last, tokens, early = time.perf_counter(), 0.0, 0.0, 0, 0
            async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    text = json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                    if not text:
                        continue
                    tokens, last = tokens + len(text), time.perf_counter()
                    if not first:
                        first, early = last, len(text)
            measured.append(
                {
                    "first_s": first - began,
                    "token_s": (last - first) / max(tokens - early, 1),
                    "tokens": tokens,
                }
            )
    return measured


def load_with(url: str, count: int, output: int, rounds: int, results: Any) -> None:
    """The clients' process."""

    async def everyone() -> list[list[dict[str, float]]]:
        return await asyncio.gather(*(client(url, output, rounds) for _ in range(count)))

    began = time.perf_counter()
    measured = [one for each in asyncio.run(everyone()) for one in each]
    results.put((time.perf_counter() - began, measured))


def serve_and_load(session: Session, settings: Settings, count: int) -> dict[str, Any]:
    """One server with `count` rows under `count` clients."""
    # The front end rounds nothing: a row holds the prompt, the answer and one block.
    config = ServeConfig(
        target="random",
        batch=count,
        max_length=settings.prompt + settings.output + session.plan.drafter.block,
        adapt=settings.adapt,
    )
    site = make_site(config, session)
    server = uvicorn.Server(uvicorn.Config(make_app(site), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    clients = context.Process(
        target=load_with,
        args=(f"http://127.0.0.1:{port}", count, settings.output, settings.rounds, results),
    )
    clients.start()
    seconds, measured = results.get()
    clients.join()
    server.should_exit = True
    thread.join()
    registry = site.engine.metrics.registry
    token_s = float(np.mean([one["token_s"] for one in measured]))
    return {
        "requests": len(measured),
        "tokens_per_s": round(sum(one["tokens"] for one in measured) / seconds, 1),
        "decode_tokens_per_s": round(count / token_s, 1),
        "first_token_ms": _spread([1e3 * one["first_s"] for one in measured]),
        "inter_token_ms": _spread([1e3 * one["token_s"] for one in measured]),
        "compilations_after_warm_up": registry.get_sample_value(
            "mmflash_compilations_after_warm_up"
        ),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        name: round(float(np.percentile(values, share)), 3)
        for name, share in (("p50", 50), ("p95", 95))
    }


def measure(settings: Settings) -> list[dict[str, Any]]:
    """A record for each load, written as soon as it is known."""
    target, target_params = load_target(
        settings.folder / "target", default_dtype(), kernels=settings.kernels
    )
    drafter, draft_params = load_drafter(
        settings.folder / "draft", target, default_dtype(), kernels=settings.kernels
    )
    rule = SyntheticRule(tuple(int(n) for n in bare.quantiles(settings.tau, drafter.block)))
    plan = Plan(target, drafter, (), rule=rule)
    params = {"target": target_params, "drafter": draft_params}
    front: Any = RandomPrompts(target, settings.prompt)
    records = []
    for count in settings.in_flight:
        served = serve_and_load(Session(plan, params, front), settings, count)
        middle = settings.prompt + settings.output // 2
        alone = bare.time_cell(
            bare.Settings(folder=settings.folder, tau=settings.tau), plan, params, count, middle
        )
        record = {
            "device": describe_device(), "target": type(target).__name__, "in_flight": count,
            "prompt": settings.prompt, "output": settings.output, "weights": "random",
            "acceptance": "synthetic", "asked_tau": settings.tau, "adapt": settings.adapt,
            **served, "bare_loop_tokens_per_s": alone["tokens_per_s"],
            "lost": round(1 - served["decode_tokens_per_s"] / alone["tokens_per_s"], 3),
            "versions": versions(),
        }  # fmt: skip
        print(json.dumps(record), flush=True)
        records.append(record)
        if settings.report:
            settings.report.write_text(json.dumps(records, indent=1) + "\n")
    return records


def main() -> int:
    measure(tyro.cli(Settings, description=__doc__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
