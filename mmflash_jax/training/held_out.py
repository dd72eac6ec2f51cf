"""Held-out prompts: what the target says to them, and how well a draft foresees it."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmflash_jax.config_train import TrainConfig, VisualConfig
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.drafters import Drafter
from mmflash_jax.engine.offline import Answers
from mmflash_jax.engine.prompts import PromptEncoder
from mmflash_jax.evaluation.measure import decode_all, measure
from mmflash_jax.evaluation.visual import visual_figures
from mmflash_jax.layers.schema import Params
from mmflash_jax.training.prompts import Prompts
from mmflash_jax.training.visual_kl import score_all


@dataclass(frozen=True)
class HeldOut:
    """What stays the same however often a draft is measured.

    plain: the target's own answers. scores: nats of each answer's tokens, None without pictures.
    """

    prompts: Sequence[Prompt]
    plain: Answers
    scores: Sequence[np.ndarray | None]


def answer_held_out(
    plan: Plan,
    target_params: Params,
    prompts: Prompts,
    encoder: PromptEncoder,
    settings: VisualConfig,
    batch: int,
) -> HeldOut:
    """Answers of the target alone and their visual scores; `plan` has no drafter."""
    params = {"target": target_params, "drafter": {}}
    plain = decode_all(plan, params, prompts, batch, "answer held-out prompts")
    answers = [completion.token_ids for completion in plain.completions]
    scored = score_all(plan, target_params, prompts.requests, prompts, answers, encoder, settings)
    return HeldOut(prompts, plain, [None if pair is None else pair[0] for pair in scored])


def evaluate(
    plan: Plan, params: dict[str, Params], held_out: HeldOut, batch: int
) -> dict[str, Any]:
    """Decode held-out prompts with a draft, by the loop that serves.

    Visual scores are those of the target's own answers. Where a drafted answer leaves them, at a
    numeric tie, the places after it have none and count in no bucket.
    """
    measured = measure(plan, params, held_out.prompts, batch, plain=held_out.plain)
    drafted, plain = measured.drafted.completions, held_out.plain.completions
    scores = [
        None if score is None else score[: _common(a.token_ids, b.token_ids)]
        for score, a, b in zip(held_out.scores, drafted, plain, strict=True)
    ]
    return measured.figures() | visual_figures(drafted, scores)


class Evaluation:
    """Measures drafts on the held-out prompts of a run, whose own answers are made once."""

    def __init__(
        self,
        plain: Plan,
        target_params: Params,
        prompts: Prompts,
        encoder: PromptEncoder,
        config: TrainConfig,
    ):
        self._plain, self._target_params = plain, target_params
        self._prompts, self._encoder, self._config = prompts, encoder, config

    @functools.cached_property
    def held_out(self) -> HeldOut:
        # A run without weights asks the same question of its draft.
        settings = self._config.visual or VisualConfig()
        return answer_held_out(
            self._plain, self._target_params, self._prompts, self._encoder, settings,
            self._config.generate.batch,
        )  # fmt: skip

    def run(self, drafter: Drafter, params: Params, path: Path) -> dict[str, Any]:
        """Figures of a draft, also written to `path`."""
        plan = dataclasses.replace(self._plain, drafter=drafter)
        everything = {"target": self._target_params, "drafter": params}
        figures = evaluate(plan, everything, self.held_out, self._config.generate.batch)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n")
        return figures


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two answers begin with alike."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
