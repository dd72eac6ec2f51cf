"""Decoding with the Pallas kernels, interpreted, gives the ids of the reference."""

import collections
import dataclasses
import importlib
import itertools

import jax
import numpy as np
import pytest

from mmflash_jax.config import SamplingSettings
from mmflash_jax.decode.prefill import prefill
from mmflash_jax.decode.records import Plan
from mmflash_jax.decode.step import propose, step
from mmflash_jax.drafters.narrowed import Narrowed
from mmflash_jax.load import load_target
from mmflash_jax.targets.gemma4 import Gemma4
from pallas_kernels import parts
from tests import tiny, tiny_gemma4
from tests.decode.running import answers
from tests.drafts import draft_for, random_params
from tests.kernels import quick_jit
from tests.targets.prompts import make_prompt
from tests.tiny_gemma4 import FULL, SLIDING

# Widths that a kernel can take: powers of two from 16 on.
QWEN35 = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
GEMMA4 = {
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, FULL],
    "num_kv_shared_layers": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
}

quick_step = quick_jit(step, static_argnames="plan")


@pytest.fixture(autouse=True, scope="module")
def products_of_full_size():
    """As those of a full-size model are, whose inner axes are longer, and the head's as those of
    many rows."""
    with pytest.MonkeyPatch.context() as patch:
        # The package's attribute of that name is the function.
        patch.setattr(importlib.import_module("pallas_kernels.likeliest"), "FEWEST_ROWS", 2)
        patch.setattr(parts, "LEAST_PART", 16)
        patch.setattr(parts, "TILE_INNER", 16)
        assert parts.number_of_parts(8, 64, 64) == 4
        yield


@pytest.fixture(scope="module", params=["qwen35", "gemma4"])
def pair(request, tmp_path_factory):
    """Target, draft, their parameters and two prompts."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen35":
        tiny.tiny_qwen35(folder, seed=1, tied=False, text=QWEN35)
    else:
        tiny_gemma4.tiny_gemma4(folder, seed=3, text=GEMMA4)
    target, params = load_target(folder, "float32")
    drafter = draft_for(folder, target_layer_ids=[0, 1], block_size=4)
    params = {"target": params, "drafter": random_params(drafter)}
    prompts = [make_prompt(target, n, seed=n, max_tokens=24) for n in (5, 23)]
    return target, drafter, params, prompts


def run(target, drafter, params, prompts, kernels, vocabulary=None):
    """Ids of both rows; prompts are always taken in by the reference."""
    plan = Plan(target, drafter, (), vocabulary)
    start = prefill(plan, params, prompts, capacity=64, chunk=32)
    while start.running.any():
        start = quick_step(with_kernels(plan, kernels), params, start)
    return start


def with_kernels(plan, kernels="interpret"):
    target, drafter = (dataclasses.replace(x, kernels=kernels) for x in (plan.target, plan.drafter))
    return dataclasses.replace(plan, target=target, drafter=drafter)


def test_drafted_ids_with_kernels_are_those_of_the_reference(pair):
    target, drafter, params, prompts = pair
    wanted = run(target, drafter, params, prompts, "reference")
    got = run(target, drafter, params, prompts, "interpret")
    assert answers(got) == answers(wanted)
    assert [len(ids) for ids in answers(got)] == [24, 24]
    # The draft went through its kernel too: it proposed what it proposes without.
    np.testing.assert_array_equal(got.drafted, wanted.drafted)


def test_widths_may_change_between_steps_with_kernels(pair):
    """Passes narrower than the blocks that rings and records are laid out for, which go round."""
    target, drafter, params, prompts = pair
    prompts = [prompts[0], dataclasses.replace(prompts[1], max_tokens=3)]
    wanted = run(target, drafter, params, prompts, "reference")
    state = prefill(Plan(target, drafter, ()), params, prompts, capacity=64, chunk=32)
    target, drafter = (dataclasses.replace(x, kernels="interpret") for x in (target, drafter))
    drafters = itertools.cycle([drafter, Narrowed(drafter, 1)])
    while state.running.any():
        state = quick_step(Plan(target, next(drafters), ()), params, state)
    assert answers(state) == answers(wanted)


def test_rows_that_sample_or_ask_for_logprobs_get_their_logits(pair):
    """One row is greedy and wants log-probabilities, one samples; the head has padding rows."""
    target, drafter, params, prompts = pair
    prompts = [
        dataclasses.replace(prompts[0], logprobs=True),
        dataclasses.replace(prompts[1], sampling=SamplingSettings(temperature=0.8, seed=3)),
    ]
    most = max(max(ids) for ids in answers(run(target, drafter, params, prompts, "reference")))
    wanted, got = (
        run(target, drafter, params, prompts, k, most) for k in ("reference", "interpret")
    )
    assert answers(got) == answers(wanted)
    assert max(max(ids) for ids in answers(got)) < most
    assert got.logprobs is not None
    assert wanted.logprobs is not None
    np.testing.assert_allclose(got.logprobs.chosen[0], wanted.logprobs.chosen[0], atol=1e-4)


@pytest.mark.parametrize("factor", [-0.5, 0.0])
def test_a_factor_that_turns_the_order_around_is_not_left_out(pair, factor):
    """The kernel finds the largest product, which such a draft does not ask for."""
    target, drafter, params, prompts = pair
    config = dataclasses.replace(drafter.config, output_multiplier=factor)
    drafter = dataclasses.replace(drafter, config=config)
    start = prefill(Plan(target, drafter, ()), params, prompts, capacity=64, chunk=32)
    quick = quick_jit(propose, static_argnames="plan")
    wanted, got = (
        quick(with_kernels(Plan(target, drafter, ()), kernels), params, start).ids
        for kernels in ("reference", "interpret")
    )
    np.testing.assert_array_equal(got, wanted)
    # All logits are equal, and the lowest id counts, or they are in their order turned around.
    assert (np.asarray(got) == 0).all() == (factor == 0)


def equations_of(jaxpr):
    """All equations of a program in order, those inside kernels left out."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "pallas_call":
            continue
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations_of(inner)


@pytest.mark.parametrize("kernels", ["reference", "interpret"])
def test_greedy_steps_with_kernels_make_no_logits(pair, kernels):
    target, drafter, params, prompts = pair
    plan = Plan(target, drafter, ())
    start = prefill(plan, params, prompts, capacity=64, chunk=32)
    program = jax.make_jaxpr(step, static_argnums=0)(with_kernels(plan, kernels), params, start)
    shapes = [out.aval.shape for each in equations_of(program.jaxpr) for out in each.outvars]
    made = [shape for shape in shapes if shape and shape[-1] == target.config.vocab_size]
    assert bool(made) == (kernels == "reference")


def test_every_layer_of_a_step_runs_a_kernel(pair):
    target, drafter, params, prompts = pair
    start = prefill(Plan(target, drafter, ()), params, prompts, capacity=64, chunk=32)
    plan = with_kernels(Plan(target, drafter, ()))
    program = jax.make_jaxpr(step, static_argnums=0)(plan, params, start)
    count = collections.Counter(
        equation.params["name"]
        for equation in equations_of(program.jaxpr)
        if equation.primitive.name == "pallas_call"
    )
    own, drafted = target.config.num_hidden_layers, len(drafter.config.layers)
    delta = count["gated_delta_advance"] + count["gated_delta_token"]
    assert delta + count["block_attention"] == own + drafted, count
    # The draft makes keys and values of the block, and of what was committed.
    assert count["attention_heads"] == count["block_attention"] + drafted, count
    # Mixer and MLP join the stream, in Gemma 4 the per-layer input too.
    joins = 3 if isinstance(target, Gemma4) else 2
    assert count["residual_norm"] == joins * own + 2 * drafted, count
    # Of the draft and of the target.
    assert count["likeliest"] == 2, count
