"""One real server on a free port: the demo pair behind uvicorn, shared by all tests here."""

import base64
import dataclasses
import io
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import uvicorn
from PIL import Image

from mmflash_jax.config import ServeConfig
from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.prefill import prefill
from mmflash_jax.decode.records import Prompt
from mmflash_jax.drafters import NoDraft
from mmflash_jax.evaluation.batch import Session, load
from mmflash_jax.registry import DEMO
from mmflash_jax.server.app import Site, make_app
from mmflash_jax.server.start import make_site

SAMPLES = DEMO / "samples"
CHARTS = sorted(SAMPLES.glob("*.png"))
CAPACITY, ROWS = 448, 8


class Served(NamedTuple):
    """A running server and what is behind it."""

    url: str
    client: openai.OpenAI
    site: Site
    session: Session

    def chat(self, text: str, *images: Any, **more: Any) -> Any:
        """A chat completion of one user message; images stand before the text."""
        return self.client.chat.completions.create(
            model="demo", messages=[message(text, *images)], **{"max_tokens": 100, **more}
        )

    def plain(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Ids of plain decoding of the same prompts, outside of the server and without a draft."""
        plan = dataclasses.replace(self.session.plan, drafter=NoDraft())
        ids: list[list[int]] = []
        for at in range(0, len(prompts), ROWS):
            part = list(prompts[at : at + ROWS])
            # Always the same shapes, so that one program serves all tests.
            padded = part + [None] * (ROWS - len(part))
            state = prefill(plan, self.session.params, padded, capacity=CAPACITY, room=128)
            state = decode(plan, self.session.params, state, 10**6)
            tokens, counts = np.asarray(state.tokens), np.asarray(state.num_tokens)
            ids += [tokens[row, : counts[row]].tolist() for row in range(len(part))]
        return ids

    def idle(self) -> bool:
        return self.site.engine.occupied == self.site.engine.waiting == 0


def message(text: str, *images: Any) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def data_url(image: Any) -> str:
    """Of a URL, a file, bytes or a PIL image."""
    if isinstance(image, str):
        return image
    if isinstance(image, Image.Image):
        stream = io.BytesIO()
        image.save(stream, "PNG")
        image = stream.getvalue()
    content = image.read_bytes() if isinstance(image, Path) else image
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def wait_until(holds: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("images")
    (root / "chart.png").write_bytes(CHARTS[0].read_bytes())
    config = ServeConfig(
        batch=4,
        max_length=CAPACITY,
        max_queue=40,
        image_root=root,
        max_images=3,
        max_image_mb=0.25,
        adapt=False,
        # Short runs: the tiny pair would end an answer before a test can stop it.
        run_ms=1.0,
    )
    session = load(config)
    site = make_site(config, session)
    server = uvicorn.Server(uvicorn.Config(make_app(site), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield Served(url, client, site, session)
    server.should_exit = True
    thread.join()
    assert site.engine.failure is None
