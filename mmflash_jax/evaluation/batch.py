"""The batch tool behind serve.py: answer a file of prompts, compare with plain decoding, report."""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from mmflash_jax.config import ServeConfig
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.demo.corpus import final_answer
from mmflash_jax.drafters import DFlash, NoDraft
from mmflash_jax.engine.backlog import answer_backlog
from mmflash_jax.engine.images import ImageError, open_image
from mmflash_jax.engine.journal import Journal
from mmflash_jax.engine.offline import Answers, Completion, until_stop
from mmflash_jax.engine.prompt_files import Line, read_requests
from mmflash_jax.engine.prompts import PromptEncoder, PromptError, Request
from mmflash_jax.evaluation import report
from mmflash_jax.evaluation.exactness import compare
from mmflash_jax.evaluation.measure import Measured
from mmflash_jax.evaluation.resume import from_line, journal_of, to_line
from mmflash_jax.layers.schema import Params
from mmflash_jax.load import (
    default_dtype,
    kernels_over,
    load_drafter,
    load_target,
    stop_ids,
    warn_of_ordinary_mask,
)
from mmflash_jax.registry import DEMO, pair
from mmflash_jax.sharding import make_mesh

log = logging.getLogger(__name__)

GREY = (128, 128, 128)


@dataclass(frozen=True)
class Session:
    """A loaded pair: plan, parameters and the front end of the target's checkpoint."""

    plan: Plan
    params: Params
    encoder: PromptEncoder


def load(config: ServeConfig, beside: Session | None = None) -> Session:
    """Load target, draft and front end as `config` names them.

    `beside` has loaded the same target already: its parameters are taken, not read again.
    """
    dtype = default_dtype() if config.dtype == "auto" else config.dtype
    folder, draft_folder = pair(config.target, config.draft)
    mesh = make_mesh(config.model_parallel) if config.model_parallel > 1 else None
    kernels = kernels_over(config.model_parallel, config.kernels)
    if beside is None:
        target, target_params = load_target(folder, dtype, mesh, kernels=kernels)
    else:
        target, target_params = beside.plan.target, beside.params["target"]
    drafter, draft_params = NoDraft(), {}
    if draft_folder is not None:
        drafter, draft_params = load_drafter(
            draft_folder, target, dtype, mesh, kernels=kernels,
            embedding_scale=config.draft_embedding_scale, draft_tokens=config.draft_tokens,
            draft_top_k=config.draft_top_k, draft_depth=config.draft_depth,
        )  # fmt: skip
    encoder = PromptEncoder.from_checkpoint(folder, target, thinking=config.thinking)
    if isinstance(drafter, DFlash):
        warn_of_ordinary_mask(drafter, encoder.tokenizer)
    plan = Plan(target, drafter, stop_ids(folder, encoder.eos_id), encoder.vocabulary)
    return Session(plan, {"target": target_params, "drafter": draft_params}, encoder)


@dataclass(frozen=True)
class Job:
    """A line that can be answered."""

    line: Line
    request: Request
    prompt: Prompt


def run(config: ServeConfig) -> int:
    """Answer the prompts; returns the exit code: 1 if a line was bad or parity failed."""
    _check_writable(config.output, config.report)
    path = config.prompts or DEMO / "samples" / "prompts.jsonl"
    lines = read_requests(path, max_tokens=config.max_tokens, sampling=config.sampling)
    session = load(config)
    longest = min(config.max_length, session.plan.target.config.max_position_embeddings)
    # Every run below, the blanked one too, keeps to the shorter of the two limits.
    config = dataclasses.replace(config, max_length=longest)
    lines, jobs = prepare(session.encoder, lines, config.max_length)
    prompts = [job.prompt for job in jobs]
    journal = None
    if config.output is not None:
        journal = journal_of(config, config.output, session.plan, prompts)
    drafted = _drafted(session, prompts, config.batch, journal)
    texts, cut = _texts(session, jobs, drafted)
    if config.output is not None and journal is not None:
        write_answers(config.output, lines, jobs, texts, cut)
        journal.path.unlink()
    measured = _measure(session, prompts, config, drafted)
    blank = answer_blanked(session, jobs, config)
    report.print_answers([job.line for job in jobs], texts, measured)
    for line in lines:
        if line.error:
            log.error(line.error)
    expected = [job.line.answer for job in jobs]
    figures = report.figures(
        session.plan,
        measured,
        accuracy=accuracy(texts, expected),
        accuracy_blank=None
        if blank is None
        else accuracy(
            [session.encoder.decode(c.token_ids) for c in blank.completions],
            [job.line.answer for job in jobs if job.line.answer is not None and job.prompt.images],
        ),
    )
    report.print_table(figures)
    if config.report:
        config.report.write_text(json.dumps(figures, indent=2) + "\n")
    failed = any(line.error for line in lines) or figures["parity"] is False
    return int(failed)


def _drafted(
    session: Session, prompts: Sequence[Prompt], batch: int, journal: Journal | None
) -> Answers:
    """Answers with the draft; with a journal a run that was killed goes on where it was."""
    decode = functools.partial(_answer, session.plan, session.params, prompts, batch, "decode")
    if journal is None:
        return decode()
    lines = journal.read()
    known = dict(from_line(line) for line in lines)
    if known:
        log.warning("%d of %d answers are in %s already", len(known), len(prompts), journal.path)
    with journal.append(keep=len(lines)) as write:
        return decode(known, lambda number, one: write([to_line(number, one)]))


def _texts(
    session: Session, jobs: Sequence[Job], answers: Answers
) -> tuple[list[str], list[Completion]]:
    """Texts and completions, up to the stop strings of their prompts."""
    ended = [
        until_stop(session.encoder.decode, completion, job.request.stop)
        for job, completion in zip(jobs, answers.completions, strict=True)
    ]
    return [text for text, _ in ended], [cut for _, cut in ended]


def _measure(
    session: Session, prompts: Sequence[Prompt], config: ServeConfig, drafted: Answers
) -> Measured:
    """Decode without the draft too, if asked for, and compare."""
    if not config.plain:
        return Measured(drafted, None, None)
    plan, params = session.plan, session.params
    alone = dataclasses.replace(plan, drafter=NoDraft())
    plain = _answer(alone, params, prompts, config.batch, "decode plainly")
    parity = compare(plan, params, prompts, drafted.completions, plain.completions)
    return Measured(drafted, plain, parity)


def _answer(
    plan: Plan,
    params: Params,
    prompts: Sequence[Prompt],
    batch: int,
    title: str,
    known: Mapping[int, Completion] | None = None,
    on_answer: Callable[[int, Completion], object] = lambda *_: None,
) -> Answers:
    """`answer_backlog` under a progress bar."""
    with tqdm(total=len(prompts), initial=len(known or {}), desc=title, unit="prompt") as bar:

        def answered(number: int, completion: Completion) -> None:
            on_answer(number, completion)
            bar.update()

        return answer_backlog(plan, params, prompts, batch=batch, known=known, on_answer=answered)


def _check_writable(*files: Path | None) -> None:
    """Fail before the work and not after it."""
    for file in files:
        if file is None:
            continue
        if not file.parent.is_dir():
            raise FileNotFoundError(f"{file} cannot be written: there is no folder {file.parent}")
        if file.is_dir():
            raise IsADirectoryError(f"{file} cannot be written: it is a folder")


def prepare(
    encoder: PromptEncoder, lines: Sequence[Line], max_length: int
) -> tuple[list[Line], list[Job]]:
    """Encode every good line; lines that cannot be encoded get an error of their own."""
    checked, jobs = [], []
    for line in tqdm(lines, desc="encode", unit="prompt", disable=len(lines) < 32):
        try:
            if line.request is not None:
                prompt = fit_to_cache(encoder.encode(line.request), max_length)
                jobs.append(Job(line, line.request, prompt))
        except (PromptError, ImageError) as error:
            line = dataclasses.replace(line, error=f"{line.where}: {error}", request=None)
        checked.append(line)
    return checked, jobs


def fit_to_cache(prompt: Prompt, max_length: int) -> Prompt:
    """The prompt with `max_tokens` cut to what the cache holds after it.

    Raises:
        PromptError: not even one token can follow.
    """
    room = max_length - len(prompt.ids)
    if room < 1:
        raise PromptError(
            f"the prompt has {len(prompt.ids)} tokens, the cache holds {max_length} with the "
            "answer (--max-length, up to the model's own limit)"
        )
    return dataclasses.replace(prompt, max_tokens=min(prompt.max_tokens, room))


def answer_blanked(session: Session, jobs: Sequence[Job], config: ServeConfig) -> Answers | None:
    """Answers to the graded prompts with pictures when these are grey; None if there are none."""
    graded = [job for job in jobs if job.line.answer is not None and job.prompt.images]
    if not graded:
        return None
    blanked = [session.encoder.encode(without_picture(job.request)) for job in graded]
    fitted = [fit_to_cache(prompt, config.max_length) for prompt in blanked]
    return _answer(session.plan, session.params, fitted, config.batch, "decode blanked")


def without_picture(request: Request) -> Request:
    """The same request with every image replaced by a grey one of its size."""
    images = (open_image(image) for image in request.images)
    grey = tuple(Image.new("RGB", image.size, GREY) for image in images)
    return dataclasses.replace(request, images=grey)


def accuracy(texts: Sequence[str], expected: Sequence[str | None]) -> float | None:
    """Share of graded texts whose final answer is the expected one; None if none is graded."""
    graded = [
        final_answer(text) == wanted.strip()
        for text, wanted in zip(texts, expected, strict=True)
        if wanted is not None
    ]
    return sum(graded) / len(graded) if graded else None


def write_answers(
    path: Path,
    lines: Sequence[Line],
    jobs: Sequence[Job],
    texts: Sequence[str],
    completions: Sequence[Completion],
) -> None:
    """One JSON object for each line of the prompt file, in order; bad lines carry `error`."""
    done = {job.line.where: (t, c) for job, t, c in zip(jobs, texts, completions, strict=True)}
    # Whole or not at all: a kill in the middle must not leave a file that looks finished.
    whole = path.with_name(f"{path.name}.new")
    with whole.open("w", encoding="utf-8") as stream:
        for line in lines:
            row: dict[str, Any] = {"id": line.id}
            if line.error is not None:
                row["error"] = line.error
            else:
                text, completion = done[line.where]
                row |= _row(text, completion)
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    whole.replace(path)


def _row(text: str, completion: Completion) -> dict[str, Any]:
    generated = len(completion.token_ids)
    return {
        "text": text,
        "token_ids": list(completion.token_ids),
        "tau": completion.tau,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": completion.prompt_tokens + generated,
        },
    }
