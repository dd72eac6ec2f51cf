"""The target's own answers to the training prompts, kept in a file beside the run.

A draft must foresee what its target really says, so it learns from nothing else.
"""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mmflash_jax.config_train import FileData, TrainConfig
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.engine.journal import Journal
from mmflash_jax.engine.offline import Completion, answer
from mmflash_jax.engine.prompt_files import prompt_files
from mmflash_jax.layers.schema import Params
from mmflash_jax.load import load_drafter
from mmflash_jax.registry import pair
from mmflash_jax.training.provenance import files_hash, target_identity

log = logging.getLogger(__name__)


def answers_path(config: TrainConfig) -> Path:
    """Where the answers of a run lie: a header, then the ids of one answer a line."""
    return config.output / "answers.jsonl"


def answers_of(
    plan: Plan, target_params: Params, prompts: Sequence[Prompt], config: TrainConfig
) -> list[tuple[int, ...]]:
    """Answers, read from `answers.jsonl` when that was made with the same settings.

    Answers are written batch by batch; a run that was killed goes on at the batch it was in. `plan`
    has no drafter; that of `generate.draft` answers if there is one. It is not among the settings
    that must agree, since it changes no answer.

    Raises:
        ConfigError: the file was made with other settings; it is left alone.
        FitError: the draft of `generate.draft` does not belong to the target.
    """
    journal = Journal(answers_path(config), _header(plan, config), "answer anew")
    known = [tuple(line) for line in journal.read()]
    if len(known) > len(prompts):
        raise journal.refuse("number of answers", len(known), len(prompts))
    if known:
        log.info("%d answers read from %s", len(known), journal.path)
    if len(known) == len(prompts) and journal.path.exists():
        return known
    batch = config.generate.batch
    # A batch is answered as a whole: bf16 answers may depend on the shape of the batch.
    del known[len(known) - len(known) % max(1, min(batch, len(prompts))) :]
    plan, params = _with_draft(plan, target_params, config)
    count = len(prompts)
    with (
        journal.append(keep=len(known)) as write,
        tqdm(total=count, initial=len(known), desc="answer", unit="prompt") as bar,
    ):

        def keep(completions: Sequence[Completion]) -> None:
            write(completion.token_ids for completion in completions)
            known.extend(completion.token_ids for completion in completions)
            bar.update(len(completions))

        answer(plan, params, prompts, batch=batch, start=len(known), on_batch=keep)
    return known


def _with_draft(
    plan: Plan, target_params: Params, config: TrainConfig
) -> tuple[Plan, dict[str, Params]]:
    _, draft = pair(config.target, config.generate.draft or "none")
    if draft is None:
        return plan, {"target": target_params, "drafter": {}}
    drafter, params = load_drafter(draft, plan.target, plan.target.dtype)
    made = dataclasses.replace(plan, drafter=drafter)
    return made, {"target": target_params, "drafter": params}


def _header(plan: Plan, config: TrainConfig) -> dict[str, Any]:
    data = {k: str(v) for k, v in dataclasses.asdict(config.data).items()}
    if isinstance(config.data, FileData):
        # The same path may hold other prompts by now, or prompts that sample in their own way.
        data["sha256"] = files_hash(prompt_files(config.data.path, config.data.kind))
    sampling = config.generate.sampling
    identity = target_identity(config.target, plan.target.dtype)
    return {
        "target": identity.pop("target"),
        "data": data,
        "max_tokens": config.generate.max_tokens,
        "sampling": "greedy" if sampling.is_greedy else dataclasses.asdict(sampling),
        "stop_ids": list(plan.stop_ids),
        **identity,
    }
