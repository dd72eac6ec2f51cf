"""How far the target's view of each answer token moves when the pictures lose their content.

One teacher-forced pass with the pictures and one without, compiled once for both, so equal inputs
give equal bits. Logits exist for a few tokens at a time only: those of a whole row would take
gigabytes.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mmflash_jax.decode.buckets import bucket
from mmflash_jax.decode.prefill import encode_media, extend, pad_prompts
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.layers.schema import Params
from mmflash_jax.training.teacher import whole_rows

LOGITS_AT_ONCE = 2**24
"""Most logits of one distribution that are in memory: 64 MB in fp32."""

Scores = tuple[np.ndarray, np.ndarray]
"""Score in nats and the target's probability of each answer token, both fp32 `[T]`."""


def score_answers(
    plan: Plan,
    target_params: Params,
    real: Sequence[Prompt],
    ablated: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    *,
    rows: int,
    vocabulary: int,
    cap: float,
) -> list[Scores]:
    """`KL(real || ablated)` of every answer token, clamped to [0, cap], for up to `rows` prompts.

    Answer tokens are compared one by one, wherever they stand: an ablated prompt may be shorter.
    vocabulary: ids that the tokenizer has; rows of the head behind them are padding, which no
    training has ever looked at.
    """
    width = bucket(max(len(answer) for answer in answers), 32)
    ids = np.zeros((rows, width), np.int32)
    for row, answer in enumerate(answers):
        ids[row, : len(answer)] = answer
    hidden = [_hidden(plan, target_params, side, answers, rows, width) for side in (real, ablated)]
    score, confidence = _divergence(
        plan, target_params, *hidden, ids, np.float32(cap), vocabulary=vocabulary
    )
    score, confidence = np.asarray(score), np.asarray(confidence)
    return [
        (score[row, : len(answer)], confidence[row, : len(answer)])
        for row, answer in enumerate(answers)
    ]


def _hidden(
    plan: Plan,
    target_params: Params,
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    rows: int,
    width: int,
) -> Array:
    """What the target is about to say at each answer token: states `[rows, width, D]`."""
    empty = [None] * (rows - len(prompts))
    # The last token predicts nothing that is scored.
    whole = [extend(prompt, answer[:-1]) for prompt, answer in zip(prompts, answers, strict=True)]
    media, first_row = encode_media(plan, {"target": target_params}, [*whole, *empty])
    longest = max(len(prompt.ids) for prompt in whole)
    ids, media_idx, positions = pad_prompts(
        plan, [*whole, *empty], [*first_row], bucket(longest, 64)
    )
    before, total = np.ones(rows, np.int32), np.zeros(rows, np.int32)
    before[: len(prompts)] = [len(prompt.ids) for prompt in prompts]
    total[: len(prompts)] = [len(prompt.ids) for prompt in whole]
    return _answer_states(
        plan, target_params, ids, media, media_idx, positions, before, total, width=width
    )


@functools.partial(jax.jit, static_argnames=("plan", "width"))
def _answer_states(
    plan: Plan,
    target_params: Params,
    ids: Int[Array, "B S"],
    media: Float[Array, "M D"] | None,
    media_idx: Int[Array, "B S"],
    positions: Int[Array, "A B S"],
    prompt_len: Int[Array, " B"],
    total_len: Int[Array, " B"],
    *,
    width: int,
) -> Float[Array, "B T D"]:
    """Final states of the places that predict the answer tokens: each one's place less one."""
    out = whole_rows(plan, target_params, ids, media, media_idx, positions, total_len)
    place = jnp.minimum(prompt_len[:, None] - 1 + jnp.arange(width), ids.shape[1] - 1)
    return jnp.take_along_axis(out.hidden, place[:, :, None], axis=1)


@functools.partial(jax.jit, static_argnames=("plan", "vocabulary"))
def _divergence(
    plan: Plan,
    target_params: Params,
    real: Float[Array, "B T D"],
    ablated: Float[Array, "B T D"],
    ids: Int[Array, "B T"],
    cap: Float[Array, ""],
    *,
    vocabulary: int,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    def logits(hidden: Array) -> Array:
        return plan.target.logits(target_params, hidden)[..., :vocabulary]

    flat = real.reshape(-1, real.shape[-1]), ablated.reshape(-1, ablated.shape[-1]), ids.reshape(-1)
    chunk = max(1, LOGITS_AT_ONCE // plan.target.config.vocab_size)
    score, confidence = chunked_divergence(logits, *flat, cap, chunk=chunk)
    return score.reshape(ids.shape), confidence.reshape(ids.shape)


def chunked_divergence(
    logits: Callable[[Array], Array],
    real: Float[Array, "N D"],
    ablated: Float[Array, "N D"],
    ids: Int[Array, " N"],
    cap: Float[Array, ""] | float,
    *,
    chunk: int,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """`token_divergence` of `logits(real)` and `logits(ablated)`, `chunk` tokens at a time."""
    count = ids.shape[0]
    chunk = min(chunk, count)
    padding = -count % chunk

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, ((0, padding), *[(0, 0)] * (x.ndim - 1)))
        return padded.reshape(-1, chunk, *x.shape[1:])

    score, confidence = jax.lax.map(
        lambda part: token_divergence(logits(part[0]), logits(part[1]), part[2], cap),
        (cut(real), cut(ablated), cut(ids)),
    )
    return score.reshape(-1)[:count], confidence.reshape(-1)[:count]


def token_divergence(
    real: Float[Array, "*n V"],
    ablated: Float[Array, "*n V"],
    ids: Int[Array, "*n"],
    cap: Float[Array, ""] | float,
) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """`KL(p || q)` in fp32 nats at temperature 1, clamped to [0, cap], and `p(id)`.

    p and q are the softmax of `real` and `ablated`. An id outside the vocabulary has probability 0.
    """
    log_p = jax.nn.log_softmax(real.astype(jnp.float32), axis=-1)
    log_q = jax.nn.log_softmax(ablated.astype(jnp.float32), axis=-1)
    score = kl_divergence(log_p, log_q)
    chosen = jnp.take_along_axis(log_p, ids[..., None], axis=-1, mode="fill", fill_value=-jnp.inf)
    # Rounding may leave a divergence of nothing just below zero.
    return jnp.clip(score, 0.0, cap), jnp.exp(chosen[..., 0])


def kl_divergence(log_p: Float[Array, "*n V"], log_q: Float[Array, "*n V"]) -> Float[Array, "*n"]:
    """`KL(p || q)` in nats from log-distributions."""
    p = jnp.exp(log_p)
    # What p excludes costs nothing, however surely it does so.
    return jnp.sum(jnp.where(p > 0, p * (log_p - log_q), 0.0), axis=-1)
