"""Mixed traffic for a while: right answers, no leaked rows, flat memory.

The long form of the suite's short run: `SOAK_REQUESTS=2000 pytest tests/server/test_soak.py`.
"""

import concurrent.futures
import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

import numpy as np
import openai
import pytest

from mmflash_jax.compilation import compiled_programs
from mmflash_jax.config import SamplingSettings
from mmflash_jax.decode.adjust import Adjustment
from mmflash_jax.engine.prompts import Request
from mmflash_jax.engine.tickets import Ticket
from mmflash_jax.server.generate import Generation
from tests.server.conftest import CHARTS, message, wait_until

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "48"))
IN_FLIGHT = 16
WORDS = "Which of these countries has the highest value in the last year of the chart , and why ?"
LENGTHS = (1, 3, 9, 17, 40)
LIMITS = (1, 5, 24, 40)


def kinds():
    """Different good requests: ragged prompts, with and without pictures, all kinds of settings."""
    random = np.random.default_rng(0)
    words = WORDS.split()
    made = []
    for number in range(32):
        text = " ".join(random.choice(words, random.choice(LENGTHS)))
        images = [CHARTS[int(i)] for i in random.integers(len(CHARTS), size=random.integers(3))]
        settings = {"max_tokens": int(random.choice(LIMITS))}
        if number % 3 == 0:
            settings |= {"temperature": 0.9, "seed": number, "top_p": 0.9}
        if number % 5 == 0:
            settings |= {"presence_penalty": 0.8, "frequency_penalty": 0.4}
        made.append((text, images, settings))
    return made


def plain_texts(served, cases):
    prompts = []
    for text, images, settings in cases:
        own = {n: settings[n] for n in ("temperature", "seed", "top_p") if n in settings}
        penalties = {n: value for n, value in settings.items() if n.endswith("_penalty")}
        request = Request(
            text=text,
            images=images,
            max_tokens=settings["max_tokens"],
            sampling=SamplingSettings(**own),
            adjustment=Adjustment(**penalties),
        )
        prompts.append(served.session.encoder.encode(request))
    return [served.session.encoder.decode(ids) for ids in served.plain(prompts)]


def resident_mb():
    """Memory of this process now, once everything free is given back."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def left_over():
    """What a request made and nobody let go of."""
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, Ticket | Generation)]


def test_mixed_traffic(served):
    cases = kinds()
    wanted = plain_texts(served, cases)
    random = np.random.default_rng(1)
    before = compiled_programs()
    jobs = list(
        zip(random.integers(len(cases), size=REQUESTS), random.random(REQUESTS), strict=True)
    )

    def one(job):
        number, chance = job
        text, images, settings = cases[number]
        if chance < 0.1:
            # Client errors stay client errors.
            with pytest.raises(openai.BadRequestError):
                served.chat(text, "data:image/png;base64,AAAA", **settings)
        elif chance < 0.25:
            stream = served.chat(text, *images, **{**settings, "max_tokens": 200}, stream=True)
            for _ in zip(range(int(chance * 40)), stream, strict=False):
                pass
            stream.close()
        elif chance < 0.6:
            stream = served.chat(text, *images, **settings, stream=True)
            deltas = [chunk.choices[0].delta.content or "" for chunk in stream]
            assert "".join(deltas) == wanted[number]
        else:
            got = served.client.chat.completions.create(
                model="demo", messages=[message(text, *images)], **settings
            )
            assert got.choices[0].message.content == wanted[number]
        return True

    with concurrent.futures.ThreadPoolExecutor(IN_FLIGHT) as pool:
        # The first half fills pools, caches and the allocator's arenas of both sides.
        parts = np.array_split(np.arange(REQUESTS), 8)
        sizes = []
        for part in parts:
            assert all(pool.map(one, [jobs[i] for i in part]))
            sizes.append(resident_mb())
        compiled = compiled_programs()
    wait_until(served.idle)
    assert compiled == before
    wait_until(lambda: not left_over(), seconds=10)
    assert max(sizes[4:]) - max(sizes[:4]) < 40, f"MiB after each part: {sizes}"
