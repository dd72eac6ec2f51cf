"""What a cell of an evaluation says: one method on one benchmark with so many in flight.

Records are JSON lines, written as soon as they are known. A run that was killed keeps them and goes
on with the others.
"""

import functools
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmflash_jax.decode.records import Prompt
from mmflash_jax.engine.offline import Answers
from mmflash_jax.evaluation.acceptance import accepted_per_position, pooled_tau
from mmflash_jax.evaluation.batch import Session
from mmflash_jax.evaluation.benchmarks import Question, is_right
from mmflash_jax.evaluation.exactness import TIE, Divergence, compare

Record = dict[str, Any]
Key = tuple[str, str, int]

PLAIN = "none"
"""The method that decodes without a draft."""


def key(record: Mapping[str, Any]) -> Key:
    """The cell of a record: method, benchmark, requests in flight."""
    return record["method"], record["benchmark"], record["concurrency"]


def cell_figures(
    session: Session,
    questions: Sequence[Question],
    prompts: Sequence[Prompt],
    passes: Sequence[Answers],
    plain: Sequence[Answers],
) -> Record:
    """Figures of one method from its passes over the prompts and those of plain decoding.

    Every pass must hold parity: ids of a pass are compared unless an earlier one had the same.
    A speed-up is the ratio of the medians. None of the speeds is given if parity fails, since a
    wrong verifier agrees with any draft; `withheld` says why.
    """
    ids = [tuple(c.token_ids for c in each.completions) for each in passes]
    distinct = [p for n, p in enumerate(passes) if ids[n] not in ids[:n]]
    reference = plain[0].completions
    parities = [
        compare(session.plan, session.params, prompts, each.completions, reference)
        for each in distinct
    ]
    wrong = [d for parity in parities for d in parity.divergences if not d.explained]
    done = passes[0].completions
    right = [
        is_right(question, session.encoder.decode(completion.token_ids))
        for question, completion in zip(questions, done, strict=True)
    ]
    graded = [verdict for verdict in right if verdict is not None]
    speeds, plain_speeds = ([each.timing.tokens_per_s for each in some] for some in (passes, plain))
    figures: Record = {
        "tau": pooled_tau(done),
        "tokens_per_s": float(np.median(speeds)),
        "plain_tokens_per_s": float(np.median(plain_speeds)),
        "speedup": float(np.median(speeds) / np.median(plain_speeds)),
        "tokens_per_s_runs": speeds,
        "plain_tokens_per_s_runs": plain_speeds,
        "parity": not wrong,
        "withheld": None,
        "rows_equal": min(sum(parity.equal) for parity in parities),
        "numeric_ties": max(sum(d.explained for d in p.divergences) for p in parities),
        "accepted_per_position": accepted_per_position(done),
        "accuracy": sum(graded) / len(graded) if graded else None,
        "graded": len(graded),
        "questions": len(questions),
        "mean_answer_tokens": float(np.mean([len(c.token_ids) for c in done])),
        "mean_prompt_tokens": float(np.mean([c.prompt_tokens for c in done])),
        "ended_by_length": sum(c.finish_reason == "length" for c in done),
    }
    if wrong:
        figures |= {name: None for name in figures if "tokens_per_s" in name} | {"speedup": None}
        figures["withheld"] = _reason(wrong, questions, session.plan.target.dtype)
    return figures


def _reason(wrong: Sequence[Divergence], questions: Sequence[Question], dtype: str) -> str:
    first = wrong[0]
    gap = "one answer ends there" if first.gap is None else f"fp32 gap {first.gap:.1e} of scale"
    rows = len({divergence.row for divergence in wrong})
    return (
        f"{rows} of {len(questions)} answers are not those of plain decoding; that to question "
        f"{questions[first.row].id}, differs at token {first.place}: {gap}, a tie is up to "
        f"{TIE[dtype]:.1e}"
    )


@functools.cache
def commit() -> str | None:
    """The commit of this checkout, with `-dirty` if files differ; None where there is none.

    It is read once: files may change while a long run goes on.
    """
    if shutil.which("git") is None:
        return None
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return told.stdout.strip() or None
