"""What a benchmark asks of a target: its questions and the prompts that they become."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from tqdm import tqdm

from mmflash_jax.decode.records import Prompt
from mmflash_jax.engine.images import ImageError
from mmflash_jax.engine.prompts import PromptEncoder, PromptError, Request
from mmflash_jax.evaluation.batch import Session, fit_to_cache
from mmflash_jax.evaluation.benchmarks import (
    BenchmarkError,
    Question,
    read_questions,
    split_name,
)
from mmflash_jax.evaluation.evaluate_config import EvaluateConfig

log = logging.getLogger(__name__)

KEPT = 256
"""Prompts that stay in memory. Patches of one large picture take tens of megabytes."""


class Prompts(Sequence[Prompt]):
    """Prompts of requests, encoded when they are asked for; the last `KEPT` are kept."""

    def __init__(self, encoder: PromptEncoder, requests: Sequence[Request], max_length: int):
        def encode(index: int) -> Prompt:
            return fit_to_cache(encoder.encode(requests[index]), max_length)

        self._count = len(requests)
        self._encode = functools.lru_cache(KEPT)(encode)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        places = range(self._count)[index]
        if isinstance(places, range):
            return [self._encode(place) for place in places]
        return self._encode(places)


@dataclass(frozen=True)
class Workload:
    """A benchmark's questions with their prompts. path: of the local copy, for the records."""

    benchmark: str
    path: str | None
    questions: Sequence[Question]
    prompts: Sequence[Prompt]


def name_benchmarks(config: EvaluateConfig) -> dict[str, Path | None]:
    """Benchmark -> path of its local copy.

    Raises:
        BenchmarkError: no such benchmark, no path, or two of one benchmark.
    """
    named: dict[str, Path | None] = {}
    for name, path in map(split_name, config.benchmarks):
        if named.setdefault(name, path) != path:
            raise BenchmarkError(
                f"{name} is named twice, as {named[name]} and {path}; give each its own output"
            )
    return named


def make_workload(
    config: EvaluateConfig, session: Session, name: str, path: Path | None
) -> Workload:
    """Questions and prompts of a benchmark; a question that cannot be encoded is told and left out.

    Raises:
        BenchmarkError: the copy is missing, partial or of another layout, or nothing can be asked.
    """
    found = read_questions(name, path, count=config.questions, seed=config.seed, style=config.style)
    requests = [
        Request(text=question.text, images=question.images, max_tokens=config.max_tokens)
        for question in found
    ]
    longest = min(config.max_length, session.plan.target.config.max_position_embeddings)
    prompts, good = Prompts(session.encoder, requests, longest), []
    for index in tqdm(range(len(found)), desc=f"encode {name}", disable=len(found) < 32):
        try:
            prompts[index]
        except (PromptError, ImageError) as error:
            log.warning("%s: question %s is left out: %s", name, found[index].id, error)
            continue
        good.append(index)
    if not good:
        raise BenchmarkError(f"{name}: none of its {len(found)} questions can be asked")
    if len(good) < len(found):
        prompts = Prompts(session.encoder, [requests[index] for index in good], longest)
    return Workload(
        name, None if path is None else str(path), [found[index] for index in good], prompts
    )
