"""Scores of answer tokens: against float64, whatever the padding, on both families."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.drafters import NoDraft
from mmflash_jax.load import load_target
from mmflash_jax.training.divergence import (
    chunked_divergence,
    kl_divergence,
    score_answers,
    token_divergence,
)
from tests.drafts import two_layer_target
from tests.targets.prompts import TEXT_IDS, make_prompt
from tests.tiny_gemma4 import tiny_gemma4

CAP = 10.0


def exact(real: np.ndarray, ablated: np.ndarray, ids: np.ndarray) -> tuple[Any, Any]:
    """The definition, in float64, without a trick."""

    def softmax(logits: np.ndarray) -> np.ndarray:
        wide = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
        return wide / wide.sum(axis=-1, keepdims=True)

    p, q = softmax(real), softmax(ablated)
    score = (p * np.log(np.maximum(p, 1e-300) / np.maximum(q, 1e-300))).sum(axis=-1)
    return np.clip(score, 0, CAP), p[np.arange(len(ids)), ids]


@pytest.mark.parametrize("chunk", [1, 7, 24, 100])
def test_chunks_equal_a_float64_divergence(chunk):
    random = np.random.default_rng(0)
    table = random.standard_normal((16, 500), np.float32)
    scale = np.logspace(-2, 1.2, 23, dtype=np.float32)[:, None]
    real = random.standard_normal((23, 16), np.float32) * scale
    ablated = real + random.standard_normal((23, 16), np.float32) * scale[::-1]
    ids = random.integers(0, 500, 23).astype(np.int32)

    def logits_of(hidden: Any) -> Any:
        return 30 * jnp.tanh(hidden @ table / 30)

    score, confidence = chunked_divergence(
        logits_of, jnp.asarray(real), jnp.asarray(ablated), jnp.asarray(ids), CAP, chunk=chunk
    )
    wanted, sure = exact(np.asarray(logits_of(real)), np.asarray(logits_of(ablated)), ids)
    assert wanted.max() == CAP
    assert wanted.min() < 0.01
    np.testing.assert_allclose(score, wanted, atol=1e-5)
    np.testing.assert_allclose(confidence, sure, atol=1e-6)


def test_fewer_outcomes_give_no_larger_divergence():
    """The likeliest k tokens and one bucket for the rest bound the score from below (data
    processing), the tighter the more tokens are kept. It is why scores are made of all of them."""
    random = np.random.default_rng(0)
    p, q = (
        np.exp(np.asarray(jax.nn.log_softmax(x)))
        for x in random.standard_normal((2, 31, 400), np.float32) * 3
    )
    order = np.argsort(-p, axis=-1)
    bounds = []
    for k in (1, 8, 128, 400):
        kept = order[:, :k]
        parts = [np.take_along_axis(x, kept, axis=-1) for x in (p, q)]
        if k < 400:
            rest = [np.take_along_axis(x, order[:, k:], axis=-1).sum(-1) for x in (p, q)]
            parts = [np.append(x, r[:, None], axis=-1) for x, r in zip(parts, rest, strict=True)]
        bounds.append(np.asarray(kl_divergence(*map(jnp.log, parts))))
    assert (np.diff(bounds, axis=0) > -1e-5).all()
    assert (bounds[0] > -1e-5).all()
    assert (bounds[2] < bounds[3]).any()


def test_extreme_logits_stay_finite_and_inside():
    real = jnp.array([[1e4, -1e4, 0], [0, 0, 0], [5, 5, 5], [-3e38, 3e38, 0]], jnp.float32)
    ids = jnp.array([0, 1, 2, 3])
    score, confidence = token_divergence(real, real[::-1], ids, CAP)
    assert jnp.isfinite(score).all()
    assert score.min() >= 0
    assert score.max() == CAP
    assert confidence[0] == 1
    assert confidence[3] == 0, "an id outside the vocabulary"


def test_the_largest_vocabulary_fits():
    """3072 answer tokens over 248,320 ids: the logits of one row alone would take 3 GB."""
    tokens, width, vocab = 3072, 64, 248_320

    def run(hidden: Any, ids: Any, table: Any) -> Any:
        return chunked_divergence(
            lambda h: h @ table, hidden, hidden, ids, CAP, chunk=2**24 // vocab
        )

    shapes = [
        jax.ShapeDtypeStruct((tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((width, vocab), jnp.float32),
    ]
    memory = jax.jit(run).lower(*shapes).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1e9


class Case(NamedTuple):
    plan: Plan
    params: Any
    real: list[Prompt]
    ablated: list[Prompt]
    answers: list[list[int]]


def case(plan: Plan, params: Any) -> Case:
    """Prompts and answers of different length, one with two pictures; other pictures as ablated."""
    parts = [(3, (4, 6), 5), ((2, 4), 30), (2, (6, 4), 1, (2, 8), 40)]
    real = [make_prompt(plan.target, *some, seed=n) for n, some in enumerate(parts)]
    grey = [
        Prompt(**{**vars(prompt), "images": tuple(
            type(image)(**{**vars(image), "patches": np.zeros_like(image.patches)})
            for image in prompt.images
        )})
        for prompt in real
    ]  # fmt: skip
    random = np.random.default_rng(9)
    answers = [random.integers(0, TEXT_IDS, n).tolist() for n in (1, 21, 40)]
    return Case(plan, params, real, grey, answers)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = two_layer_target(tmp_path_factory.mktemp("target"))
    target, params = load_target(folder, "float32")
    return case(Plan(target, NoDraft(), ()), params)


def scores(made: Case, rows: list[int], batch: int, *, vocabulary: int = 10**6, **changes: Any):
    made = made._replace(**changes)
    real, ablated = ([some[row] for row in rows] for some in (made.real, made.ablated))
    answers = [made.answers[row] for row in rows]
    return score_answers(
        made.plan, made.params, real, ablated, answers, rows=batch, vocabulary=vocabulary, cap=CAP
    )


def test_each_answer_token_has_a_score(qwen):
    made = scores(qwen, [0, 1, 2], 3)
    assert [len(score) for score, _ in made] == [1, 21, 40]
    assert all((score >= 0).all() and (score <= CAP).all() for score, _ in made)
    assert all(((sure > 0) & (sure < 1)).all() for _, sure in made)
    assert all(score.max() > 1e-3 for score, _ in made), "pictures matter even to random weights"


def test_equal_pictures_give_nothing(qwen):
    """Check (a)."""
    for score, _ in scores(qwen, [0, 1, 2], 3, ablated=qwen.real):
        assert score.max() < 1e-4


def test_neither_padding_nor_order_nor_neighbours_matter(qwen):
    """Check (d)."""
    together = scores(qwen, [0, 1, 2], 3)
    for order, batch in (([2, 0, 1], 4), ([1, 2], 2), ([0], 1), ([1], 8)):
        for row, made in zip(order, scores(qwen, order, batch), strict=True):
            for one, other in zip(together[row], made, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5)


def test_shorter_prompts_are_compared_token_by_token(qwen):
    """As `textonly`: the same answer after a prompt of another length."""
    target = qwen.plan.target
    text = [make_prompt(target, 3, seed=n) for n in range(3)]
    made = scores(qwen, [0, 1, 2], 3, ablated=text)
    swapped = scores(qwen, [0, 1, 2], 3, real=text, ablated=text)
    assert all(score.max() < 1e-4 for score, _ in swapped)
    assert all(score.max() > 1e-3 for score, _ in made)
    # The confidence of the text-only side is what that prompt gives alone, at its own places.
    back = scores(qwen, [0, 1, 2], 3, real=text, ablated=qwen.real)
    for (_, one), (_, other) in zip(swapped, back, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_padding_rows_of_the_head_do_not_count(qwen):
    """Logits behind the tokenizer's ids may be anything."""
    wide = dict(qwen.params)
    head = np.array(wide["lm_head"]["embedding"])
    head[TEXT_IDS + 20 :] *= 100
    wide["lm_head"] = {"embedding": jnp.asarray(head)}
    few = TEXT_IDS + 20
    for one, other in zip(
        scores(qwen, [0, 1, 2], 3, vocabulary=few),
        scores(qwen, [0, 1, 2], 3, vocabulary=few, params=wide),
        strict=True,
    ):
        np.testing.assert_array_equal(one[0], other[0])


def test_gemma4_in_bf16_with_a_soft_cap_is_finite(tmp_path):
    """Check (h)."""
    tiny_gemma4(tmp_path)
    target, params = load_target(tmp_path, "bfloat16")
    made = case(Plan(target, NoDraft(), ()), params)
    for score, sure in scores(made, [0, 1, 2], 3):
        assert np.isfinite(score).all()
        assert np.isfinite(sure).all()
        assert score.dtype == np.float32
        assert 0 < score.max() <= CAP
    for score, _ in scores(made, [0, 1, 2], 3, ablated=made.real):
        assert score.max() < 1e-4
