"""Sampled ids: exact in distribution, and the same with any draft, in any batch, per seed."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mmflash_jax.decode.prefill import extend
from mmflash_jax.decode.sampling import (
    Sampling,
    SamplingSettings,
    choose,
    gather,
    log_probabilities,
)
from mmflash_jax.decode.step import _pick
from mmflash_jax.layers.scores import Scores
from tests.decode import drafters
from tests.decode.running import answers, generate, walk
from tests.targets.passes import prefill
from tests.targets.prompts import make_prompt

VOCABULARY = 8
# 99.99 % points of chi-square would need a table; mean + 5 standard deviations is safe for df >= 5.
FILTERS = {
    "none": {},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "all": {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
}


def settings_of(**fields) -> Sampling:
    """Settings of one row that samples."""
    sampling = gather([SamplingSettings(**fields)])
    assert sampling is not None
    return sampling


def expected(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The filtered distribution in fp64, by sorting."""
    z = logits.astype(np.float64) / temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    if top_k:
        p[np.argsort(-p)[top_k:]] = 0
    order = np.argsort(-p)
    reached = np.cumsum(p[order]) - p[order] < top_p * p.sum()
    p[order[~reached]] = 0
    return p / p.sum()


def assert_drawn_from(counts, p):
    """Chi-square of counts; cells that cannot occur must be empty."""
    total = counts.sum()
    assert counts[p == 0].sum() == 0
    live = p > 0
    degrees = live.sum() - 1
    if degrees == 0:
        return
    statistic = ((counts[live] - total * p[live]) ** 2 / (total * p[live])).sum()
    assert statistic < degrees + 5 * np.sqrt(2 * degrees), (statistic, degrees)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_follow_the_filtered_distribution(name, temperature):
    """DISTR over one place, and independence of neighbouring places of one seed."""
    sampling = settings_of(temperature=temperature, seed=11, **FILTERS[name])
    logits = np.random.default_rng(3).normal(scale=1.5, size=VOCABULARY).astype(np.float32)
    draws = 40_000
    p = expected(logits, temperature=temperature, **FILTERS[name])
    many = jnp.broadcast_to(jnp.asarray(logits), (1, draws, VOCABULARY))
    got = np.exp(np.asarray(log_probabilities(many[:, :1], sampling))[0, 0])
    np.testing.assert_allclose(got, p, rtol=1e-5, atol=1e-7)
    ids = np.asarray(choose(Scores.of(many), sampling, jnp.arange(draws)[None]))[0]
    assert_drawn_from(np.bincount(ids, minlength=VOCABULARY), p)
    pairs = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(pairs, (ids[::2], ids[1::2]), 1)
    assert_drawn_from(pairs.ravel(), np.outer(p, p).ravel())


def test_differences_below_bfloat16_count():
    """A06: one fp32 distribution, also where rounding would make two tokens equal."""
    logits = np.array([8.0, 8.015, 0.0], np.float32)
    assert len(set(logits.astype(ml_dtypes.bfloat16).tolist())) == 2
    draws, temperature = 40_000, 0.02
    many = Scores.of(jnp.broadcast_to(jnp.asarray(logits), (1, draws, 3)))
    ids = choose(many, settings_of(temperature=temperature, seed=4), jnp.arange(draws)[None])
    share = np.bincount(np.asarray(ids)[0], minlength=3) / draws
    np.testing.assert_allclose(share, expected(logits, temperature=temperature), atol=0.01)
    assert share[1] > 0.6, "equal in bfloat16"


def test_filters_keep_the_fewest_tokens_and_ties_together():
    logits = np.log(np.array([[[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]]], np.float32))

    def kept(**fields):
        sampling = settings_of(temperature=1.0, **fields)
        return np.isfinite(np.asarray(log_probabilities(jnp.asarray(logits), sampling)))[0].sum(-1)

    assert kept().tolist() == [4, 4]
    assert kept(top_k=2).tolist() == [2, 4]
    assert kept(top_p=0.39).tolist() == [1, 4]
    assert kept(top_p=0.65).tolist() == [2, 4]
    assert kept(min_p=0.6).tolist() == [2, 4]
    # Of the three that top_k leaves, two reach 0.7 of what is left.
    assert kept(top_k=3, top_p=0.7).tolist() == [2, 4]


@pytest.mark.parametrize("script", ["oracle", "adversarial", "random", "ragged", "dflash"])
def test_a_seed_draws_the_same_with_any_draft(bench, script):
    """PARITY at a temperature: rows of different settings, one of them greedy, in one batch."""
    rows = (6, 1, 2, 0)
    prompts = with_sampling(bench.some(*rows))
    plain = plain_answers(bench, prompts)
    assert plain[3] == bench.plain[0]
    assert all(one != bench.plain[row] for one, row in zip(plain[:3], rows, strict=False))
    if script == "dflash":
        plan, params = bench.dflash()
    else:
        known = [p.ids.tolist() + ids for p, ids in zip(prompts, plain, strict=True)]
        plan, params = bench.scripted(getattr(drafters, script)(known))
    states = walk(plan, params, prompts)
    assert answers(states[-1]) == plain


def plain_answers(bench, prompts):
    plan, params = bench.undrafted()
    return answers(generate(plan, params, prompts))


def with_sampling(prompts):
    settings = [
        SamplingSettings(temperature=1.0, seed=1),
        SamplingSettings(temperature=0.7, top_k=20, seed=2),
        SamplingSettings(temperature=1.3, top_p=0.9, min_p=0.01, seed=2**40 + 3),
        SamplingSettings(),
    ]
    return [
        dataclasses.replace(prompt, sampling=one)
        for prompt, one in zip(prompts, settings, strict=True)
    ]


def test_a_request_draws_the_same_in_any_company(bench):
    """A08: by its seed alone; other seeds give other answers."""
    plan, params = bench.dflash()
    prompts = with_sampling(bench.some(6, 1, 2, 0))
    together = answers(generate(plan, params, prompts))
    assert answers(generate(plan, params, prompts[1:2]))[0] == together[1]
    seeds = [
        dataclasses.replace(prompts[1], sampling=SamplingSettings(temperature=1.0, seed=seed))
        for seed in (5, 6, 7, 5)
    ]
    drawn = answers(generate(plan, params, seeds))
    assert drawn[0] == drawn[3]
    assert len({tuple(ids) for ids in drawn}) == 3


def test_filters_that_leave_one_token_are_greedy(bench):
    """A07, with and without drafting; a batch of such rows alone: the last test of this file."""
    one = SamplingSettings(seed=9, temperature=1.5, top_k=1)
    tiny = SamplingSettings(seed=9, temperature=1.5, top_p=1e-6)
    prompts = bench.some(1, 2, sampling=one) + bench.some(1, 6, sampling=tiny)
    assert gather([prompt.sampling for prompt in prompts]) is not None
    wanted = [bench.plain[row] for row in (1, 2, 1, 6)]
    assert plain_answers(bench, prompts) == wanted
    plan, params = bench.dflash()
    assert answers(generate(plan, params, prompts)) == wanted


# Settings of the rows of one batch, in turns.
JOINT = [
    {"temperature": 0.7, "top_k": 6, "min_p": 0.02},
    {"temperature": 1.3, "top_p": 0.9},
]


@pytest.mark.parametrize("draft", ["none", "dflash", "adversarial"])
def test_two_tokens_have_the_joint_distribution_of_the_target(bench, draft):
    """A05: DISTR through the loop, the tokens that a verify step decides, whatever was drafted."""
    rows = 1024
    prompt = make_prompt(bench.target, 9, seed=5, max_tokens=3)
    prompts = [
        dataclasses.replace(prompt, sampling=SamplingSettings(seed=seed, **JOINT[seed % 2]))
        for seed in range(rows)
    ]
    if draft == "adversarial":
        plan, params = bench.scripted(drafters.adversarial([[]] * rows))
    else:
        plan, params = bench.dflash() if draft == "dflash" else bench.undrafted()
    plan = dataclasses.replace(plan, vocabulary=VOCABULARY)
    ids = np.array(answers(generate(plan, params, prompts, capacity=16, chunk=16)))

    def logits_after(known):
        """After the prompt and each of some continuations of equal length."""
        longer = [extend(prompt, one) for one in known]
        passed = prefill(bench.target, bench.params, longer, [16], capacity=16, capture=())
        return [logits[-1][:VOCABULARY] for logits in passed.logits]

    (first,), second = logits_after([[]]), logits_after([[one] for one in range(VOCABULARY)])
    for mine, fields in zip((ids[::2], ids[1::2]), JOINT, strict=True):
        one = expected(first, **fields)
        p = one[:, None] * np.stack([expected(logits, **fields) for logits in second])
        assert 12 < (p > 0).sum() < VOCABULARY**2
        counts = np.zeros((VOCABULARY, VOCABULARY))
        np.add.at(counts, (mine[:, 0], mine[:, 1]), 1)
        assert_drawn_from(counts.ravel(), p.ravel())


def test_padding_rows_of_the_head_are_never_chosen(bench):
    """D08: neither by the target nor by the draft, greedy or drawn."""
    known = 150
    prompts = with_sampling(bench.some(6, 1, 2, 0))
    assert all(max(ids) >= known for ids in plain_answers(bench, prompts)), "they would be chosen"
    plan, params = bench.undrafted()
    plain = answers(generate(dataclasses.replace(plan, vocabulary=known), params, prompts))
    assert max(map(max, plain)) < known
    plan, params = bench.dflash()
    plan = dataclasses.replace(plan, vocabulary=known)
    state = walk(plan, params, prompts)[-1]
    assert answers(state) == plain
    logits = jnp.where(jnp.arange(288) == known, 9.0, jnp.zeros((4, 1, 288)))
    assert (np.asarray(_pick(plan, state, Scores.of(logits))) < known).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
    ],
)
def test_values_without_a_meaning_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**fields)


def test_greedy_batches_carry_no_sampling():
    assert gather([SamplingSettings(), SamplingSettings(top_k=1, temperature=2.0)]) is None
    mixed = gather([SamplingSettings(), SamplingSettings(temperature=2.0)])
    assert jax.tree.leaves(mixed)[0].shape == (2,)
