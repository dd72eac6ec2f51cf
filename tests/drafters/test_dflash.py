"""DFlash drafts against z-lab's own package, fp32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.drafters import Heads
from tests.drafters import zlab
from tests.drafters.zlab import FULL, SLIDING
from tests.drafts import anchor_of, context_of
from tests.tolerances import LAYER, MODEL, assert_close

SOME = {"target_layer_ids": [0, 2], "block_size": 8}
DRAFTS = {
    # z-lab's first releases: block size at top level, five captured layers named by the rule.
    "older": {"layers": [FULL] * 5, "own": {}, "block_size": 16},
    # Newer releases: eight captured layers, everything in dflash_config.
    "newer": {
        "layers": [SLIDING] * 5 + [FULL],
        "own": {"target_layer_ids": [1, 5, 9, 13, 17, 21, 25, 29], "block_size": 16},
        "sliding_window": 12,
    },
    "all sliding": {"layers": [SLIDING] * 2, "own": SOME, "sliding_window": 5},
    "window wider than the block": {"layers": [SLIDING] * 2, "own": SOME, "sliding_window": 20},
    "mixed": {"layers": [SLIDING] * 3 + [FULL], "own": SOME, "sliding_window": 6},
    "all causal": {
        "layers": [SLIDING, FULL], "own": SOME, "sliding_window": 6, "is_causal": True,
    },
    "both ways": {
        "layers": [SLIDING, FULL], "own": SOME, "sliding_window": 6, "is_causal": False,
    },
    "scaled, capped and biased": {
        "layers": [FULL] * 2,
        "own": {
            **SOME,
            "input_embedding_scale": 5.7,
            "output_multiplier": 1.5,
            "final_logit_softcapping": 4.0,
        },
        "attention_bias": True,
    },
}  # fmt: skip
# Context lengths of the rows; the longest is far beyond every window.
LENGTHS = np.array([1, 45, 17])
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(zlab.VOCAB_SIZE, zlab.WIDTH)).astype(np.float32)
HEAD = (RNG.normal(size=TABLE.shape) / zlab.WIDTH**0.5).astype(np.float32)
HEADS = Heads(
    embed=lambda ids: jnp.asarray(TABLE)[ids],
    logits=lambda x: jnp.einsum("...d,vd->...v", x, HEAD, precision=jax.lax.Precision.HIGHEST),
)


def absorber(drafter):
    return jax.jit(drafter.absorb)


def absorb_all(drafter, params, features, pieces):
    """Contexts of ragged rows in several calls; rows past a count are junk."""
    state = drafter.init_state(len(features), 64)
    absorb = absorber(drafter)
    lengths = np.array([len(row) for row in features])
    at = np.zeros(len(features), np.int32)
    width = max(max(counts) for counts in pieces)
    for counts in pieces:
        count = np.minimum(counts, lengths - at)
        part = np.full((len(features), width, features[0].shape[1]), 1e4, np.float32)
        for row, piece in enumerate(features):
            part[row, : count[row]] = piece[at[row] : at[row] + count[row]]
        state = absorb(params, state, context_of(part, at, count))
        at = at + count
    np.testing.assert_array_equal(at, lengths)
    return state


@pytest.fixture(scope="module", params=DRAFTS)
def draft(request, tmp_path_factory):
    """z-lab's model and ours of the same folder."""
    folder = tmp_path_factory.mktemp("draft")
    model = zlab.save(folder, **DRAFTS[request.param])
    return model, *zlab.load(folder)


def features_of(drafter, lengths=LENGTHS):
    width = len(drafter.capture) * zlab.WIDTH
    return [RNG.normal(size=(n, width)).astype(np.float32) for n in lengths]


def block_logits(drafter, params, state, ids, start):
    @jax.jit
    def run(params, state, ids, start):
        hidden = drafter.denoise(params, state, ids[:, None], start[:, None], HEADS)
        return drafter.logits(hidden[:, 0], HEADS)

    return np.asarray(run(params, state, ids, start))


def test_logits_match_z_lab(draft):
    """C08: every mask kind with context beyond the window, on ragged rows of one batch, whose
    contexts came in through calls of different counts."""
    model, drafter, params = draft
    features = features_of(drafter)
    pieces = [[1, 16, 16], [0, 16, 1], [5, 3, 0], [0, 10, 16]]
    state = absorb_all(drafter, params, features, pieces)
    ids = RNG.integers(0, zlab.VOCAB_SIZE, (3, drafter.block))
    ids[:2, 1:] = zlab.MASK_ID
    got = block_logits(drafter, params, state, ids.astype(np.int32), LENGTHS)
    for row in range(3):
        wanted = zlab.logits(model, features[row], ids[row], TABLE, HEAD)
        assert_close(got[row], wanted, MODEL, f"row {row}")


def test_proposal_is_the_best_token_of_each_masked_row(draft):
    """Row k predicts the token at its own position; the anchor's row predicts nothing."""
    model, drafter, params = draft
    features = features_of(drafter)
    state = absorb_all(drafter, params, features, [[16, 16, 16]] * 3)
    anchor = jnp.array([3, 70, 200])
    proposal = jax.jit(
        lambda params, state: drafter.propose(params, state, anchor_of(anchor, LENGTHS), HEADS)
    )(params, state)
    assert proposal.ids.shape == (3, drafter.block - 1)
    for row in range(3):
        ids = np.full(drafter.block, zlab.MASK_ID)
        ids[0] = anchor[row]
        wanted = zlab.logits(model, features[row], ids, TABLE, HEAD)[1:]
        best = wanted.max(-1)
        chosen = np.take_along_axis(wanted, np.asarray(proposal.ids)[row][:, None], -1)[:, 0]
        np.testing.assert_allclose(chosen, best, rtol=MODEL)


def test_a_row_drafts_the_same_alone_and_in_a_batch(draft):
    """Neighbours of other lengths, and junk in slots past a row's context, change nothing."""
    _, drafter, params = draft
    features = features_of(drafter)
    ids = RNG.integers(0, zlab.VOCAB_SIZE, (3, drafter.block)).astype(np.int32)
    state = absorb_all(drafter, params, features, [[16, 16, 16]] * 3)
    unused = np.arange(64) >= LENGTHS[:, None, None, None]
    unused = jnp.asarray(unused.swapaxes(2, 3))
    dirty = jax.tree.map(lambda x: jnp.where(unused, 1e18, x), state)
    together = block_logits(drafter, params, dirty, ids, LENGTHS)
    for row in range(3):
        alone = absorb_all(drafter, params, features[row : row + 1], [[16]] * 3)
        here = slice(row, row + 1)
        got = block_logits(drafter, params, alone, ids[here], LENGTHS[here])[0]
        assert_close(got, together[row], LAYER, f"row {row}")


def test_blocks_at_several_places_of_one_context(draft):
    """Training's form: block `a` of a row sees the context before its own start only."""
    model, drafter, params = draft
    (features,) = features_of(drafter, np.array([45]))
    state = absorb_all(drafter, params, [features], [[45]])
    starts = np.array([[45, 3, 20]])
    ids = RNG.integers(0, zlab.VOCAB_SIZE, (1, 3, drafter.block)).astype(np.int32)
    hidden = jax.jit(
        lambda params, state: drafter.logits(
            drafter.denoise(params, state, jnp.asarray(ids), jnp.asarray(starts), HEADS), HEADS
        )
    )(params, state)
    for place, start in enumerate(starts[0]):
        block = ids[0, place].astype(np.int64)
        wanted = zlab.logits(model, features[:start], block, TABLE, HEAD)
        assert_close(hidden[0, place], wanted, MODEL, f"block at {start}")
