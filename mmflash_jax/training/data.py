"""Training rows: prompts, the target's own answers to them, padded batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grain
from PIL import Image

from mmflash_jax.config import ChartData, JsonlData
from mmflash_jax.decode.prefill import extend
from mmflash_jax.decode.records import Prompt
from mmflash_jax.demo.corpus import sample_examples
from mmflash_jax.engine.jsonl import read_requests
from mmflash_jax.engine.prompts import Request


@dataclass(frozen=True)
class Row:
    """A prompt with the target's answer to it.

    prompt: ids and positions of prompt and answer together.
    prompt_len: tokens before the answer; only answer tokens are trained on.
    """

    prompt: Prompt
    prompt_len: int


def prompt_requests(
    data: ChartData | JsonlData, max_tokens: int, held_out: int
) -> tuple[list[Request], list[Request]]:
    """Training requests and `held_out` evaluation requests, which share no chart or line.

    Raises:
        ValueError: a line of the file is bad; training does not start on half its data.
    """
    if isinstance(data, ChartData):
        return (
            chart_requests(data.count, data.seed, max_tokens, held_out=False),
            chart_requests(held_out, data.seed, max_tokens, held_out=True),
        )
    lines = read_requests(data.path, max_tokens=max_tokens)
    bad = [str(line.error) for line in lines if line.error is not None]
    if bad:
        raise ValueError("\n".join(bad))
    requests = [line.request for line in lines if line.request is not None]
    if data.held_out >= len(requests):
        raise ValueError(
            f"data: held_out is {data.held_out}, but {data.path} holds {len(requests)} prompts"
        )
    split = len(requests) - data.held_out
    return requests[:split], requests[split : split + held_out]


def chart_requests(count: int, seed: int, max_tokens: int, *, held_out: bool) -> list[Request]:
    """Questions about charts of both styles, without their reference answers."""
    return [
        Request(
            id=f"chart-{index}",
            text=example.question,
            images=(Image.fromarray(example.image),),
            max_tokens=max_tokens,
        )
        for index, example in enumerate(sample_examples(count, seed, held_out=held_out))
    ]


def make_row(prompt: Prompt, answer: Sequence[int], row_length: int) -> Row | None:
    """A training row of at most `row_length` tokens; None if fewer than two answer tokens fit."""
    room = row_length - len(prompt.ids)
    if min(room, len(answer)) < 2:
        return None
    return Row(extend(prompt, answer[:room]), len(prompt.ids))


def batches(rows: Sequence[Row], batch: int, seed: int) -> Iterator[list[Row]]:
    """Endless batches, reshuffled every epoch."""
    if len(rows) < batch:
        raise ValueError(f"{len(rows)} training rows do not fill a batch of {batch}")
    order = grain.MapDataset.source(list(range(len(rows)))).seed(seed).shuffle().repeat()
    for indices in order.to_iter_dataset().batch(batch):
        yield [rows[index] for index in indices]
