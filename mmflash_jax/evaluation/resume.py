"""Answers of a prompt file that a kill does not lose.

They are kept beside the output as they come, and a run with the same prompts and settings makes
the others. The output itself is written once, at the end.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmflash_jax.config import ServeConfig
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.engine.journal import Journal
from mmflash_jax.engine.offline import Completion


def journal_of(config: ServeConfig, output: Path, plan: Plan, prompts: Sequence[Prompt]) -> Journal:
    """The answers of a run that has not ended: `OUTPUT.part`."""
    header = {
        "target": config.target,
        "draft": config.draft,
        "draft_tokens": config.draft_tokens,
        "dtype": plan.target.dtype,
        "stop_ids": list(plan.stop_ids),
        "prompts": _digest(prompts),
        "order": "as they end",
    }
    return Journal(output.with_name(f"{output.name}.part"), header, "answer anew")


def _digest(prompts: Sequence[Prompt]) -> str:
    """Of all that an answer depends on: tokens, pictures, limits, sampling."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.max_tokens, prompt.sampling)).encode())
        digest.update(prompt.ids.tobytes())
        for image in prompt.images:
            digest.update(repr(image.patches.shape).encode())
            digest.update(np.ascontiguousarray(image.patches).tobytes())
    return digest.hexdigest()


def to_line(number: int, completion: Completion) -> dict[str, Any]:
    """The completion of a prompt as JSON."""
    return {
        "prompt": number,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "steps": completion.steps,
        "committed": completion.committed.tolist(),
        "drafted": completion.drafted.astype(int).tolist(),
    }


def from_line(line: dict[str, Any]) -> tuple[int, Completion]:
    """Number and completion of a line that `to_line` made."""
    return line["prompt"], Completion(
        token_ids=tuple(line["token_ids"]),
        finish_reason=line["finish_reason"],
        prompt_tokens=line["prompt_tokens"],
        steps=line["steps"],
        committed=np.array(line["committed"], np.int32),
        drafted=np.array(line["drafted"], bool),
    )
