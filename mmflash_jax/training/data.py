"""Training rows: prompts, the target's own answers to them, padded batches."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from mmflash_jax.config import SamplingSettings
from mmflash_jax.config_train import ChartData, FileData
from mmflash_jax.decode.buckets import bucket
from mmflash_jax.decode.prefill import extend
from mmflash_jax.decode.records import Prompt
from mmflash_jax.decode.sampling import GREEDY
from mmflash_jax.demo.corpus import sample_examples
from mmflash_jax.engine.prompt_files import read_requests
from mmflash_jax.engine.prompts import Request
from mmflash_jax.training.token_weights import TokenWeights
from mmflash_jax.weights.hf_config import ConfigError

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """A prompt with the target's answer to it, ready to be padded.

    ids, media_idx, positions: of prompt and answer together, as in `Prompt`.
    media: features `[M, D]` of the prompt's images. The image tower is frozen, and features are
        several times smaller than the patches they come from.
    prompt_len: tokens before the answer; only answer tokens are trained on.
    weight: fp32 `[S]`, what each token counts as a label; 1 where nothing is known, 0 for tokens
        that must not be one. Only answer places have a meaning.
    score: fp32 `[S]`, visual score in nats, NaN where there is none.
    """

    ids: np.ndarray
    media_idx: np.ndarray
    positions: np.ndarray
    media: np.ndarray
    prompt_len: int
    weight: np.ndarray
    score: np.ndarray

    @property
    def supervised(self) -> int:
        """Tokens that can be a label: those of the answer after its first, which begins a block."""
        return int((self.weight[self.prompt_len + 1 :] > 0).sum())


def prompt_requests(
    data: ChartData | FileData,
    max_tokens: int,
    held_out: int,
    sampling: SamplingSettings = GREEDY,
) -> tuple[list[Request], list[Request]]:
    """Training requests and `held_out` evaluation requests, which share no chart or line.

    Raises:
        ConfigError: a line of a file is bad; training does not start on half its data.
    """
    if isinstance(data, ChartData):
        return (
            chart_requests(data.count, data.seed, max_tokens, sampling, held_out=False),
            chart_requests(held_out, data.seed, max_tokens, sampling, held_out=True),
        )
    lines = read_requests(data.path, max_tokens=max_tokens, sampling=sampling, kind=data.kind)
    bad = [str(line.error) for line in lines if line.error is not None]
    if bad:
        raise ConfigError("\n".join(bad))
    # A line may ask for less than the run does, not for more.
    requests = [
        dataclasses.replace(line.request, max_tokens=min(line.request.max_tokens, max_tokens))
        for line in lines
        if line.request is not None
    ]
    if data.held_out >= len(requests):
        raise ConfigError(
            f"data: held_out is {data.held_out}, but {data.path} holds {len(requests)} prompts"
        )
    split = len(requests) - data.held_out
    return requests[:split], requests[split : split + held_out]


def chart_requests(
    count: int, seed: int, max_tokens: int, sampling: SamplingSettings = GREEDY, *, held_out: bool
) -> list[Request]:
    """Questions about charts of both styles, without their reference answers."""
    return [
        Request(
            id=f"chart-{index}",
            text=example.question,
            images=(Image.fromarray(example.image),),
            max_tokens=max_tokens,
            sampling=sampling.of_row(index),
        )
        for index, example in enumerate(sample_examples(count, seed, held_out=held_out))
    ]


def make_row(
    prompt: Prompt,
    media: np.ndarray,
    answer: Sequence[int],
    row_length: int,
    visual: TokenWeights | None = None,
) -> Row | None:
    """A training row of at most `row_length` tokens; None if no token of it can be a label.

    `visual` brings weights and scores of the answer tokens; without it every weight is 1.
    """
    room = row_length - len(prompt.ids)
    if room <= 0:
        return None
    whole = extend(prompt, answer[:room])
    weight = np.ones(len(whole.ids), np.float32)
    score = np.full(len(whole.ids), np.nan, np.float32)
    if visual is not None:
        weight[len(prompt.ids) :] = visual.weight[:room]
        score[len(prompt.ids) :] = visual.score[:room]
    row = Row(
        ids=whole.ids,
        media_idx=whole.media_idx,
        positions=whole.positions,
        media=media,
        prompt_len=len(prompt.ids),
        weight=weight,
        score=score,
    )
    return row if row.supervised else None


def collate(rows: Sequence[Row], width: int) -> Batch:
    """Pad rows on the right to `width`; media rows of all are stacked, padded to a bucket."""
    axes = rows[0].positions.shape[0]
    ids = np.zeros((len(rows), width), np.int32)
    media_idx = np.full((len(rows), width), -1, np.int32)
    positions = np.zeros((axes, len(rows), width), np.int32)
    weight = np.zeros((len(rows), width), np.float32)
    before = 0
    for index, row in enumerate(rows):
        length = len(row.ids)
        ids[index, :length] = row.ids
        media_idx[index, :length] = np.where(row.media_idx < 0, -1, row.media_idx + before)
        positions[:, index, :length] = row.positions
        weight[index, :length] = row.weight
        before += len(row.media)
    media = np.zeros((bucket(before, 64), rows[0].media.shape[1]), rows[0].media.dtype)
    media[:before] = np.concatenate([row.media for row in rows])
    return {
        "ids": ids,
        "media": media,
        "media_idx": media_idx,
        "positions": positions,
        "prompt_len": np.array([row.prompt_len for row in rows], np.int32),
        "total_len": np.array([len(row.ids) for row in rows], np.int32),
        "weight": weight,
    }
