"""A draft over made-up features, and the loss and the proposal as the product computes them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from mmflash_jax.config_train import ObjectiveConfig
from mmflash_jax.drafters import DFlash, Heads
from mmflash_jax.training.objective import block_loss
from tests.drafts import anchor_of, random_params

WIDTH, VOCAB_SIZE, BLOCK, WINDOW, DECAY = 32, 40, 8, 5, 3.0
CAPTURED = 2 * WIDTH
SETTINGS = ObjectiveConfig(decay=DECAY)
LAYER_KINDS = {
    "full": ("full_attention", "full_attention"),
    "sliding": ("sliding_attention", "sliding_attention"),
    "mixed": ("sliding_attention", "full_attention"),
}

_random = np.random.default_rng(0)
TABLE = _random.standard_normal((VOCAB_SIZE, WIDTH), np.float32)
HEAD = _random.standard_normal((WIDTH, VOCAB_SIZE), np.float32) / np.float32(WIDTH**0.5)


def drafter(kind: str = "mixed") -> DFlash:
    return DFlash.from_hf(
        {
            "architectures": ["DFlashDraftModel"],
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "layer_types": list(LAYER_KINDS[kind]),
            "sliding_window": WINDOW,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "vocab_size": VOCAB_SIZE,
            "num_target_layers": 8,
            "dflash_config": {
                "target_layer_ids": [1, 5],
                "mask_token_id": VOCAB_SIZE - 1,
                "block_size": BLOCK,
            },
        },
        "float32",
    )


class Recorder:
    """The borrowed head, which keeps the logits it returned last."""

    def __init__(self) -> None:
        self.last: Array | None = None
        self.heads = Heads(embed=lambda ids: jnp.asarray(TABLE)[ids], logits=self._logits)

    def _logits(self, hidden: Array) -> Array:
        self.last = jnp.einsum("...d,dv->...v", hidden, HEAD, precision=jax.lax.Precision.HIGHEST)
        return self.last


def training_logits(
    plan: DFlash, params: Any, features: Any, ids: Any, total_len: Any, anchors: Any
) -> Array:
    """What `block_loss` compares with the labels, `[B, A, block - 1, V]`."""

    @jax.jit
    def run(params: Any, features: Any, ids: Any, total_len: Any, anchors: Any) -> Array:
        recorder = Recorder()
        valid = jnp.ones(anchors.shape, bool)
        block_loss(plan, params, recorder.heads, features, ids, total_len, anchors, valid, SETTINGS)
        assert recorder.last is not None
        return recorder.last

    return run(params, features, ids, total_len, anchors)


def serving_logits(plan: DFlash, params: Any, state: Any, anchor: Any, length: Any) -> Array:
    """What `propose` takes the best ids of, `[B, block - 1, V]`."""

    @jax.jit
    def run(params: Any, state: Any, anchor: Any, length: Any) -> Array:
        recorder = Recorder()
        plan.propose(params, state, anchor_of(anchor, length), recorder.heads)
        assert recorder.last is not None
        return recorder.last

    return run(params, state, anchor, length)


def features_and_ids(rows: int, width: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    features = random.standard_normal((rows, width, CAPTURED), np.float32)
    return features, random.integers(0, VOCAB_SIZE - 1, (rows, width)).astype(np.int32)


def params_of(plan: DFlash) -> dict[Any, Any]:
    return random_params(plan, seed=3)
