"""The objective over a real (tiny) target: its own distributions, and a step with every option."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmflash_jax.config_train import ObjectiveConfig, OptimiserConfig
from mmflash_jax.decode.records import Plan
from mmflash_jax.drafters import NoDraft
from mmflash_jax.engine.offline import answer
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.load import load_target
from mmflash_jax.training.data import collate, make_row
from mmflash_jax.training.step import (
    Recipe,
    make_optimiser,
    make_state,
    target_states,
    train_step,
)
from tests.drafts import draft_for, random_params, two_layer_target

ROW_LENGTH = 40


def test_teacher_logits_are_those_that_wrote_the_answer(tmp_path):
    """D03: hidden states are those after the final norm, and the one at t names token t + 1.

    Then a step of divergence and D-PACE with token weights, in chunks, moves the draft.
    """
    folder = two_layer_target(tmp_path)
    target, params = load_target(folder, "float32")
    drafter = draft_for(folder, block_size=4)
    encoder = PromptEncoder.from_checkpoint(folder, target)
    prompts = [encoder.encode(Request(text=text, max_tokens=9)) for text in ("Hi", "And you?")]
    draft = random_params(drafter)
    plan = Plan(target, drafter, ())
    plain, everything = Plan(target, NoDraft(), ()), {"target": params, "drafter": {}}
    made = answer(plain, everything, prompts, batch=2)
    empty = np.zeros((0, target.config.hidden_size), np.float32)
    rows = [
        make_row(prompt, empty, list(completion.token_ids), ROW_LENGTH)
        for prompt, completion in zip(prompts, made.completions, strict=True)
    ]
    batch: dict[str, Any] = collate([row for row in rows if row is not None], ROW_LENGTH)

    @jax.jit
    def choices(params: Any, batch: Any) -> Any:
        return jnp.argmax(target.logits(params, target_states(plan, params, batch)[1]), axis=-1)

    chosen = np.asarray(choices(params, batch))
    for row in range(2):
        begin, end = batch["prompt_len"][row], batch["total_len"][row]
        assert end - begin == 9
        assert chosen[row, begin - 1 : end - 1].tolist() == batch["ids"][row, begin:end].tolist()

    settings = ObjectiveConfig(anchors=6, loss="kl", position="dpace", chunk=2)
    transform = make_optimiser(OptimiserConfig(steps=10, warmup=0.1, learning_rate=1e-2))
    recipe = Recipe(plan=plan, transform=transform, objective=settings)
    state = make_state(recipe, draft)
    batch["weight"] = np.random.default_rng(0).uniform(0.5, 2, batch["ids"].shape).astype("f4")
    losses = []
    for _ in range(6):
        state, metrics = train_step(recipe, params, state, batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.9 * losses[1]
