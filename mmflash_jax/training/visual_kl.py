"""Visual-KL: scores of answer tokens, kept in a file beside the answers, and weights from them.

Scores need the target and are stored; weights follow from them in no time, so another strength or
another weighting trains on the same file.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mmflash_jax.config_train import TrainConfig, VisualConfig
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.engine.journal import Journal
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.layers.schema import Params
from mmflash_jax.training.ablation import ablate, parameters
from mmflash_jax.training.answers import answers_path
from mmflash_jax.training.divergence import Scores, score_answers
from mmflash_jax.training.provenance import file_hash, target_identity
from mmflash_jax.training.token_weights import TokenWeights, supervised_tokens, token_weights

log = logging.getLogger(__name__)


def visual_path(config: TrainConfig) -> Path:
    """Where the scores of a run lie: a header, then one answer a line."""
    return config.output / "visual.jsonl"


def visual_weights(
    plan: Plan,
    target_params: Params,
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    encoder: PromptEncoder,
    config: TrainConfig,
) -> list[TokenWeights] | None:
    """Weights of every sample's answer tokens; None when the run has no `visual` settings.

    To be called after `answers_of`, with what it answered: `requests` and their encoded `prompts`.
    `plan` has no drafter. Scores are read from `visual.jsonl` or made and written there batch by
    batch; a killed run goes on where it stopped. Strength 0 scores too: evaluation by visual bucket
    wants the scores of a draft that was trained without weights.

    Raises:
        ConfigError: `visual.jsonl` was made with other settings or other answers.
    """
    settings = config.visual
    if settings is None:
        return None
    scored = visual_scores(plan, target_params, requests, prompts, answers, encoder, config)
    image_id = plan.target.config.image_token_id
    return [
        weights_of(answer, scores, config.row_length - len(prompt.ids), image_id, settings)
        for prompt, answer, scores in zip(prompts, answers, scored, strict=True)
    ]


def visual_scores(
    plan: Plan,
    target_params: Params,
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    encoder: PromptEncoder,
    config: TrainConfig,
) -> list[Scores | None]:
    """Scores of every sample, None for those without pictures; read from the file or made.

    Raises:
        ConfigError: as `visual_weights`.
    """
    settings = config.visual
    assert settings is not None
    header = _header(plan, encoder.vocabulary, config)
    journal = Journal(visual_path(config), header, "score anew")
    lines = journal.read()
    _check(journal, lines, prompts, answers)
    if lines:
        log.info("scores of %d answers read from %s", len(lines), journal.path)
    groups = list(_groups(prompts, answers, settings.batch))
    # Whole groups only: the shape of a batch may change the last bits.
    done = max((end for _, end in groups if end <= len(lines)), default=0)
    if len(lines) < len(prompts) or not journal.path.exists():
        del lines[done:]
        with (
            journal.append(keep=done) as write,
            tqdm(total=len(prompts), initial=done, desc="visual", unit="prompt") as bar,
        ):
            for members, end in groups:
                if end <= len(lines):
                    continue
                made = _score(
                    plan, target_params, requests, prompts, answers, encoder, settings, members
                )
                fresh = [_to_line(made.get(index)) for index in range(len(lines), end)]
                write(fresh)
                bar.update(len(fresh))
                lines += fresh
    return [_from_line(line) for line in lines]


def score_all(
    plan: Plan,
    target_params: Params,
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    encoder: PromptEncoder,
    settings: VisualConfig,
) -> list[Scores | None]:
    """Scores of every answer, None for those without pictures; nothing is read or written."""
    made: dict[int, Scores] = {}
    with tqdm(total=len(prompts), desc="visual", unit="prompt") as bar:
        for members, end in _groups(prompts, answers, settings.batch):
            made |= _score(
                plan, target_params, requests, prompts, answers, encoder, settings, members
            )
            bar.update(end - bar.n)
    return [made.get(index) for index in range(len(prompts))]


def _score(
    plan: Plan,
    target_params: Params,
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    encoder: PromptEncoder,
    settings: VisualConfig,
    members: Sequence[int],
) -> dict[int, Scores]:
    """Scores of the answers with these numbers, at most `settings.batch` of them."""
    if not members:
        return {}
    # Encoded once: an index into `Prompts` opens the picture.
    real = [prompts[index] for index in members]
    scores = score_answers(
        plan, target_params, real,
        [_ablated(requests[i], p, encoder, settings) for i, p in zip(members, real, strict=True)],
        [answers[index] for index in members],
        rows=settings.batch, vocabulary=encoder.vocabulary, cap=settings.cap,
    )  # fmt: skip
    return dict(zip(members, scores, strict=True))


def weights_of(
    answer: Sequence[int],
    scores: Scores | None,
    room: int,
    image_id: int,
    settings: VisualConfig,
) -> TokenWeights:
    """Weights of one sample, of whose answer `room` tokens fit a row."""
    ids = np.asarray(answer, np.int32)
    supervised = supervised_tokens(ids, image_id) & (np.arange(len(ids)) < room)
    score, confidence = scores or (None, None)
    weight = token_weights(score, confidence, supervised, settings)
    weight[ids == image_id] = 0.0
    return TokenWeights(weight, np.full(len(ids), np.nan, np.float32) if score is None else score)


def _groups(
    prompts: Sequence[Prompt], answers: Sequence[Sequence[int]], batch: int
) -> Iterator[tuple[list[int], int]]:
    """Samples with pictures, `batch` at a time, and the number of samples done after each group.

    Samples of text alone are in no group, so they change nothing for the others.
    """
    seen = [i for i, prompt in enumerate(prompts) if prompt.images and len(answers[i])]
    for start in range(0, len(seen), batch):
        members = seen[start : start + batch]
        yield members, members[-1] + 1
    yield [], len(prompts)


def _ablated(
    request: Request, prompt: Prompt, encoder: PromptEncoder, settings: VisualConfig
) -> Prompt:
    made = encoder.encode(ablate(request, settings.ablation, settings.seed))
    if settings.ablation != "textonly" and not np.array_equal(made.ids, prompt.ids):
        raise ValueError(f"request {request.id!r}: its prompt is not the one that was answered")
    return made


def _header(plan: Plan, vocabulary: int, config: TrainConfig) -> dict[str, Any]:
    settings = config.visual
    assert settings is not None
    return {
        **target_identity(config.target, plan.target.dtype),
        "ablation": settings.ablation,
        "ablation_parameters": parameters(settings.ablation),
        "seed": settings.seed,
        "estimator": "full",
        "cap": settings.cap,
        "temperature": 1.0,
        "vocabulary": vocabulary,
        # Whose header names the prompts.
        "answers": file_hash(answers_path(config)),
    }


def _check(
    journal: Journal,
    lines: Sequence[Any],
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
) -> None:
    if len(lines) > len(prompts):
        raise journal.refuse("number of answers", len(lines), len(prompts))
    for number, (line, prompt, answer) in enumerate(zip(lines, prompts, answers, strict=False), 1):
        there = 0 if line is None else len(line["score"])
        here = len(answer) if prompt.images else 0
        if there != here:
            raise journal.refuse(f"number of scores of answer {number}", there, here)


def _to_line(scores: Scores | None) -> dict[str, list[float]] | None:
    if scores is None:
        return None
    # The shortest digits that give the same fp32 again.
    score, confidence = ([float(str(value)) for value in part] for part in scores)
    return {"score": score, "confidence": confidence}


def _from_line(line: dict[str, list[float]] | None) -> Scores | None:
    if line is None:
        return None
    return np.array(line["score"], np.float32), np.array(line["confidence"], np.float32)
