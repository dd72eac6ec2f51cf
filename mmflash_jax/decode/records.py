"""Records of decoding. No logic: what each stage hands to the next.

Request -> `Prompt` -> `DecodeState` -> (`Proposal` -> `Verification` -> `Acceptance`) ->
`DecodeState`. Device records are frozen pytrees; `Prompt` and `PatchedImage` hold host arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mmflash_jax.decode.adjust import NEUTRAL, Adjustment, Adjustments
from mmflash_jax.decode.logprobs import Logprobs
from mmflash_jax.decode.sampling import GREEDY, Sampling, SamplingSettings
from mmflash_jax.drafters import Drafter
from mmflash_jax.layers.scores import Scores
from mmflash_jax.targets import Target


@dataclass(frozen=True, kw_only=True)
class PatchedImage:
    """One preprocessed image.

    patches: fp32 `[rows * columns, C]`, in the order of the target's `unpack_image`.
    rows, columns: patches down and across.
    num_tokens: tokens this image takes in the prompt.
    """

    patches: np.ndarray
    rows: int
    columns: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request, ready for the device.

    ids: int32 `[P]`, every image placeholder already expanded.
    media_idx: int32 `[P]`, row of this prompt's own media features, -1 for text.
    positions: int32 `[A, P]`, the target's rotary positions (A axes).
    rope_shift: rotary position minus index of every token after the prompt.
    images: in the order of their placeholders.
    max_tokens: most tokens to generate, at least 1.
    sampling: how its tokens are chosen.
    adjustment: what is done to the logits before.
    logprobs: whether log-probabilities are asked for.
    """

    ids: np.ndarray
    media_idx: np.ndarray
    positions: np.ndarray
    rope_shift: int
    images: tuple[PatchedImage, ...]
    max_tokens: int
    sampling: SamplingSettings = GREEDY
    adjustment: Adjustment = NEUTRAL
    logprobs: bool = False


RUNNING, STOP, LENGTH, ABSENT = 0, 1, 2, 3
FINISH_REASONS = {STOP: "stop", LENGTH: "length"}


@dataclass(frozen=True)
class Plan:
    """The static side of decoding: what is compiled, never traced.

    stop_ids: token ids that end a row; the stop token itself is returned.
    vocabulary: ids from 0 that the tokenizer has. Rows of the head behind them are padding, whose
        logits mean nothing: neither target nor draft ever chooses one. None: every row is a token.
    rule: replaces `decode.accept.accept`, with its arguments; for measurements only.
    """

    target: Target
    drafter: Drafter
    stop_ids: tuple[int, ...]
    vocabulary: int | None = None
    rule: Callable[..., "Acceptance"] | None = None

    def tokens_only(self, logits: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
        """Logits that exclude padding rows of the head."""
        if self.vocabulary is None or self.vocabulary >= logits.shape[-1]:
            return logits
        return jnp.where(jnp.arange(logits.shape[-1]) < self.vocabulary, logits, -jnp.inf)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeState:
    """Everything that changes while a batch decodes. Only `prefill` and `commit` make one.

    tokens: int32 `[B, N]`, generated ids; the first `num_tokens` of a row count.
    num_tokens: int32 `[B]`, tokens generated so far, the first one (from prefill) included.
    limit: int32 `[B]`, most tokens to generate.
    anchor: int32 `[B]`, the last known token: decided, but in no cache yet.
    length: int32 `[B]`, tokens in the target's cache and in the drafter's context.
    rope_shift: int32 `[B]`, rotary position minus index of generated tokens.
    reason: int32 `[B]`, RUNNING, or why the row ended; ABSENT marks rows without a request.
    steps: int32 `[B]`, verify steps taken while running.
    committed: int32 `[B, block]`, how many of those steps committed index + 1 tokens.
    drafted: bool `[B, N]`, which tokens are accepted drafts; the others are the target's own
        choice: the token of prefill, then the one that ends each step.
    cache: the target's, valid for `length` tokens.
    draft: the drafter's state, valid for `length` tokens.
    sampling: how each row's tokens are chosen; None if all rows are greedy.
    adjustments: biases and penalties; None if no row has any.
    logprobs: of the tokens in `tokens`; None if no row asks for them.

    Invariants after prefill and after every step:
    - length + 1 = prompt tokens + num_tokens: all known tokens but the anchor are in the caches;
    - a row that is not RUNNING no longer changes;
    - nothing after a stop token is in `tokens`, counted or in a cache.
    """

    tokens: Int[Array, "B N"]
    num_tokens: Int[Array, " B"]
    limit: Int[Array, " B"]
    anchor: Int[Array, " B"]
    length: Int[Array, " B"]
    rope_shift: Int[Array, " B"]
    reason: Int[Array, " B"]
    steps: Int[Array, " B"]
    committed: Int[Array, "B block"]
    drafted: Bool[Array, "B N"]
    cache: Any
    draft: Any
    sampling: Sampling | None
    adjustments: Adjustments | None = None
    logprobs: Logprobs | None = None

    @property
    def running(self) -> Array:
        """Bool `[B]`: rows that still decode."""
        return self.reason == RUNNING


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The target's view of a block, a chain or a tree.

    scores: of `[B, block]` places; place t is about the token after block token (or node) t.
    features: `[B, block, features]`.
    cache: uncommitted.
    """

    scores: Scores
    features: Float[Array, "B block features"]
    cache: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What a step adds to each row.

    ids: int32 `[B, block]`, accepted drafts and then the target's own token; `count` of them count.
    count: int32 `[B]`, 0 for rows that do not run, else 1 .. block, already cut at a stop token
        and at the row's limit.
    drafted: int32 `[B]`, how many of these are drafts: the first ones, `count` - 1 of them unless
        the row was cut inside them.
    reason: int32 `[B]`, the row's state after this step.
    path: int32 `[B, block]`, where the block was a tree: the nodes that stay, from the anchor down.
        `count` of them count. None for a chain, of which the first `count` tokens stay.
    """

    ids: Int[Array, "B block"]
    count: Int[Array, " B"]
    drafted: Int[Array, " B"]
    reason: Int[Array, " B"]
    path: Int[Array, "B block"] | None = None
