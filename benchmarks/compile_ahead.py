"""Compile what an evaluation of one method runs, before its draft is trained.

Compiled programs do not depend on a draft's numbers. They are kept on disk
(`mmflash_jax.compilation`), and traced ones in the process.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.prepared import Loaded
from mmflash_jax.config_train import TrainConfig
from mmflash_jax.decode.records import Prompt
from mmflash_jax.engine.offline import Completion
from mmflash_jax.evaluation.batch import Session
from mmflash_jax.evaluation.evaluate_config import EvaluateConfig
from mmflash_jax.evaluation.exactness import compare
from mmflash_jax.evaluation.in_flight import answer_in_flight, shape_for
from mmflash_jax.evaluation.methods import load_methods, name_methods
from mmflash_jax.evaluation.records import PLAIN
from mmflash_jax.evaluation.workload import make_workload
from mmflash_jax.load import default_dtype
from mmflash_jax.training.export import write_draft
from mmflash_jax.training.objective import Trained


def write_untrained(config: TrainConfig, folder: Path) -> None:
    """A draft of the config's kind as it is before its first step."""
    plan = Loaded.of(config.target, default_dtype()).drafted(config)
    assert isinstance(plan.drafter, Trained)
    wide = dataclasses.replace(plan.drafter, dtype="float32")
    write_draft(folder, plan.drafter, wide.init_params(0))


def compile_ahead(config: EvaluateConfig, methods: Sequence[str]) -> None:
    """Run every program of some of the config's methods once."""
    sessions, _ = load_methods(config, name_methods(config))
    for name in config.benchmarks:
        work = make_workload(config, sessions[PLAIN], name, None)
        # A step or two of each: every size of prompt is met, and the time is compilation's.
        short = [dataclasses.replace(prompt, max_tokens=2) for prompt in work.prompts]
        for method in methods:
            session = sessions[method]
            for slots in config.concurrency:
                shape = shape_for(work.prompts, slots)
                answer_in_flight(session.plan, session.params, short, shape)
        if PLAIN in methods:
            _compare_at_all_lengths(sessions[PLAIN], work.prompts, config.max_tokens)


def _compare_at_all_lengths(
    session: Session, prompts: Sequence[Prompt], max_tokens: int, step: int = 16
) -> None:
    """Examine one difference and several, after 1, 17, 33, ... tokens of the shortest and of the
    longest prompt: each size of fp32 program is met."""
    by_length = sorted(prompts, key=lambda prompt: len(prompt.ids))
    for prompt in (by_length[0], by_length[-1]):
        for length in range(1, max_tokens, step):
            for count in (1, 2):
                drafted, plain = (_said(prompt, length, last, count) for last in (0, 1))
                compare(session.plan, session.params, [prompt] * count, drafted, plain)


def _said(prompt: Prompt, length: int, last: int, count: int) -> list[Completion]:
    """An answer of `length` like tokens and another one, `count` times."""
    one = Completion(
        token_ids=(*[0] * length, last), finish_reason="length", prompt_tokens=len(prompt.ids),
        steps=length, committed=np.zeros(1, np.int32), drafted=np.zeros(length + 1, bool),
    )  # fmt: skip
    return [one] * count
