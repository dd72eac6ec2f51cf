"""B04: one request means one prompt, whichever way its image comes in."""

import base64
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmflash_jax.engine.prompt_files import read_requests
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.load import load_target


@pytest.fixture(scope="module")
def encoder(qwen35):
    target, _ = load_target(qwen35.folder, "float32")
    return PromptEncoder.from_checkpoint(qwen35.folder, target)


def test_file_bytes_picture_chat_and_prompt_file_give_the_same_prompt(encoder, tmp_path):
    file = tmp_path / "noise.png"
    pixels = np.random.default_rng(0).integers(0, 256, (70, 110, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    parts: list[Any] = [{"type": "image"}, {"type": "text", "text": "Hi"}]
    chat = [{"role": "user", "content": parts}]
    prompts_file = tmp_path / "prompts.jsonl"
    encoded = base64.b64encode(file.read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    rows = [
        {"text": "Hi", "images": ["noise.png"]},
        {"messages": chat, "images": [encoded]},
        {"messages": [{"role": "user", "content": [part, parts[1]]}]},
        {"conversations": [{"from": "human", "value": "<image>Hi"}, {"from": "gpt", "value": "A"}],
         "images": ["noise.png"]},
    ]  # fmt: skip
    prompts_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {"messages": [chat], "images": [[{"bytes": file.read_bytes(), "path": None}]]}
    pq.write_table(pa.table(table), tmp_path / "prompts.parquet")
    lines = read_requests(prompts_file, max_tokens=256)
    lines += read_requests(tmp_path / "prompts.parquet", max_tokens=256)
    assert [line.question for line in lines] == ["Hi"] * 5
    first, *others = [
        encoder.encode(request)
        for request in (
            Request(text="Hi", images=(file,)),
            Request(text="Hi", images=(file.read_bytes(),)),
            Request(text="Hi", images=(Image.fromarray(pixels),)),
            Request(messages=chat, images=(file,)),
            *(line.request for line in lines),
        )
        if request is not None
    ]
    assert len(others) == 8
    assert (first.media_idx >= 0).sum() == first.images[0].num_tokens > 0
    for other in others:
        for name in ("ids", "media_idx", "positions"):
            np.testing.assert_array_equal(getattr(first, name), getattr(other, name))
        np.testing.assert_array_equal(first.images[0].patches, other.images[0].patches)
        assert first.rope_shift == other.rope_shift
