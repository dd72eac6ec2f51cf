"""The objective against one big masked attention in fp64 numpy (`brute.py`).

Overlapping anchors, ragged rows, packed documents, sliding layers, every loss and weighting.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.config_train import ObjectiveConfig
from mmflash_jax.training.blocks import at_anchors, document_starts
from mmflash_jax.training.objective import block_loss
from tests.tolerances import LAYER, assert_close
from tests.training import brute, toy

# No multiple of the block of 8 tokens (D14), and blocks that reach past the end.
WIDTH = 29
FEATURES, IDS = toy.features_and_ids(2, WIDTH)
PLAIN = brute.Case(
    features=FEATURES,
    ids=IDS,
    total_len=np.array([29, 14]),
    anchors=np.array([[5, 6, 9, 27, 20, 0], [13, 2, 11, 3, 0, 0]]),
    valid=np.array([[True] * 6, [False, True, True, True, False, False]]),
    token_weight=np.ones((2, WIDTH), np.float32),
    segments=np.zeros((2, WIDTH), int),
)
_random = np.random.default_rng(4)
WEIGHTED = PLAIN._replace(
    token_weight=np.where(
        _random.random((2, WIDTH)) < 0.2, 0.0, _random.uniform(0.5, 3.0, (2, WIDTH))
    ).astype(np.float32)
)
# Numbers of documents need not rise, and may return; the last run of each row is padding.
PACKED = WEIGHTED._replace(
    segments=np.array([[7] * 8 + [2] * 3 + [7] * 12 + [1] * 6, [1] * 5 + [2] * 9 + [0] * 15]),
)
CASES = {"plain": PLAIN, "weighted": WEIGHTED, "packed": PACKED}


def unique(case: brute.Case) -> brute.Case:
    """The same documents, numbered so that no number returns, as `brute` wants them."""
    begins = np.diff(case.segments, axis=1, prepend=case.segments[:, :1]) != 0
    return case._replace(segments=begins.cumsum(axis=1))


@functools.cache
def expected_logits(kind: str, name: str) -> np.ndarray:
    plan = toy.drafter(kind)
    return brute.logits_of(plan, toy.params_of(plan), unique(CASES[name]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", toy.LAYER_KINDS)
def test_logits_are_those_of_the_mask_table(kind, name):
    """Only packed rows hand document starts over; positions restart in `brute` and not in ours."""
    plan, case = toy.drafter(kind), CASES[name]

    @jax.jit
    def run(params: Any, features: Any, ids: Any, anchors: Any) -> Any:
        first = at_anchors(document_starts(jnp.asarray(case.segments)), anchors)
        state = plan.context_state(params, features)
        start = jnp.full((*anchors.shape, toy.BLOCK), plan.config.mask_token_id)
        start = start.at[:, :, 0].set(at_anchors(ids, anchors))
        return plan.block_logits(
            params, toy.Recorder().heads, state, start, anchors,
            first if name == "packed" else None,
        )  # fmt: skip

    got = run(toy.params_of(plan), case.features, case.ids, case.anchors)
    assert_close(got, expected_logits(kind, name)[:, :, 1:], 3 * LAYER)


OBJECTIVES = {
    "ce": {},
    "kl": {"loss": "kl"},
    "dpace": {"position": "dpace"},
    "dpace 0.2, kl": {"position": "dpace", "dpace_alpha": 0.2, "loss": "kl"},
}
TEACHER = np.random.default_rng(9).standard_normal((2, WIDTH, toy.WIDTH)).astype(np.float32)


def teacher_logits(hidden: Any) -> Any:
    """Another head than the draft's, with a soft cap."""
    return 2.0 * jnp.tanh(hidden @ toy.HEAD[::-1] / 2.0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_is_that_of_the_mask_table(objective, name):
    """In two chunks of blocks; `test_objective_chunks` holds chunks against the whole."""
    plan, case = toy.drafter(), CASES[name]
    fields: dict[str, Any] = OBJECTIVES[objective]
    settings = ObjectiveConfig(decay=toy.DECAY, chunk=4, **fields)

    @jax.jit
    def run(params: Any) -> Any:
        return block_loss(
            plan, params, toy.Recorder().heads, jnp.asarray(case.features), jnp.asarray(case.ids),
            jnp.asarray(case.total_len), jnp.asarray(case.anchors), jnp.asarray(case.valid),
            settings,
            token_weight=None if name == "plain" else jnp.asarray(case.token_weight),
            segments=jnp.asarray(case.segments) if name == "packed" else None,
            teacher_hidden=jnp.asarray(TEACHER),
            teacher_logits=teacher_logits,
        )[0]  # fmt: skip

    teacher = np.asarray(teacher_logits(jnp.asarray(TEACHER)), np.float64)
    wanted = brute.objective(
        expected_logits("mixed", name), unique(case), toy.DECAY,
        dpace=settings.dpace_alpha if settings.position == "dpace" else None,
        teacher=teacher if settings.loss == "kl" else None,
    )  # fmt: skip
    assert float(run(toy.params_of(plan))) == pytest.approx(wanted, rel=2e-5)


def test_a_document_of_a_packed_row_trains_as_if_it_were_alone():
    """Its loss and its gradients, although its positions do not begin at zero."""
    plan = toy.drafter()
    ids, features = IDS[:1], FEATURES[:1]
    begin, end = 9, 22
    segments = np.array([[1] * begin + [2] * (end - begin) + [3] * (WIDTH - end)])
    anchors, valid = jnp.array([[10, 12, 17, 20]]), jnp.ones((1, 4), bool)

    def loss(params: Any, features: Any, ids: Any, length: int, anchors: Any, segments: Any) -> Any:
        return block_loss(
            plan, params, toy.Recorder().heads, jnp.asarray(features), jnp.asarray(ids),
            jnp.array([length]), anchors, valid, toy.SETTINGS, segments=segments,
        )[0]  # fmt: skip

    run = jax.jit(jax.value_and_grad(loss), static_argnums=3)
    params = toy.params_of(plan)
    packed, packed_gradient = run(params, features, ids, WIDTH, anchors, jnp.asarray(segments))
    alone, gradient = run(
        params, features[:, begin:end], ids[:, begin:end], end - begin, anchors - begin, None
    )
    assert float(packed) == pytest.approx(float(alone), rel=1e-5)
    for one, other in zip(jax.tree.leaves(packed_gradient), jax.tree.leaves(gradient), strict=True):
        assert_close(one, other, 10 * LAYER)
