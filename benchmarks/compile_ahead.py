"""Compile what an evaluation of one method runs, before its draft is trained.

Compiled programs do not depend on a draft's numbers. They are kept on disk
(`mmflash_jax.compilation`), and traced ones in the process.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.prepared import Loaded
from mmflash_jax.config import TrainConfig
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
    """Examine differences after 1, 17, 33, ... tokens: each size of fp32 program is met."""
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    lengths = range(1, max_tokens, step)

    def said(last: int) -> list[Completion]:
        return [
            Completion(
                token_ids=(*[0] * length, last), finish_reason="length",
                prompt_tokens=len(longest.ids), steps=length,
                committed=np.zeros(1, np.int32), drafted=np.zeros(length + 1, bool),
            )
            for length in lengths
        ]  # fmt: skip

    compare(session.plan, session.params, [longest] * len(lengths), said(0), said(1))
