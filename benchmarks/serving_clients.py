"""Clients of `benchmarks.serving`, in a process of their own that needs neither JAX nor a GPU.

    python -m benchmarks.serving_clients --url http://127.0.0.1:8000 --count 8

Prints JSON: for each round and request the moments at which text came, in seconds since the round
began, and how many letters it had. With random checkpoints every token reads as one letter.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass

import httpx2
import tyro


@dataclass(frozen=True)
class Load:
    """What to ask for."""

    url: str
    count: int = 1
    """Requests at once."""
    output: int = 512
    """Tokens of an answer."""
    rounds: int = 1


async def ask(http: httpx2.AsyncClient, url: str, output: int) -> list[tuple[float, int]]:
    """One streamed answer."""
    body = {
        "model": "random",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": output,
        "stream": True,
    }
    events = []
    async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"the server answers {chunk['error']}")
            text = chunk["choices"][0]["delta"].get("content") or ""
            if text:
                events.append((time.perf_counter(), len(text)))
    return events


async def load(asked: Load) -> list[list[list[list[float]]]]:
    """Rounds of `count` requests at once; a round begins when the one before has ended."""
    measured = []
    async with httpx2.AsyncClient(timeout=None) as http:
        for _ in range(asked.rounds):
            began = time.perf_counter()
            asking = (ask(http, asked.url, asked.output) for _ in range(asked.count))
            answers = await asyncio.gather(*asking)
            measured.append([[[at - began, n] for at, n in events] for events in answers])
    return measured


def main() -> int:
    given = tyro.cli(Load, description=__doc__)
    print(json.dumps(asyncio.run(load(given))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
