"""Log-probabilities of chosen tokens and of the likeliest ones beside them.

They are the target's own, at temperature 1 and before penalties, biases and filters (vLLM's
`raw_logprobs`), so they do not change with how a request samples.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

MOST = 20
"""Likeliest tokens kept at each place: the most that the OpenAI API lets a client ask for."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """By place in each row's answer, in nats; rows that are not `wanted` hold anything.

    chosen: of the token that was chosen.
    ids, values: the likeliest tokens, likeliest first.
    """

    wanted: Bool[Array, " B"]
    chosen: Float[Array, "B N"]
    ids: Int[Array, "B N K"]
    values: Float[Array, "B N K"]


def no_logprobs(wanted: Bool[Array, " B"], room: int, vocabulary: int) -> Logprobs:
    """Room for the answers' log-probabilities, nothing known."""
    B, K = wanted.shape[0], min(MOST, vocabulary)
    return Logprobs(
        wanted=wanted,
        chosen=jnp.zeros((B, room), jnp.float32),
        ids=jnp.zeros((B, room, K), jnp.int32),
        values=jnp.zeros((B, room, K), jnp.float32),
    )


def note(
    logprobs: Logprobs | None,
    logits: Callable[[], Float[Array, "B T V"]],
    ids: Int[Array, "B T"],
    slot: Int[Array, "B T"],
) -> Logprobs | None:
    """Write down the tokens `ids` at places `slot`; places past the end are dropped. Their `logits`
    are asked for only if some row wants to know."""
    if logprobs is None:
        return None
    rows = jnp.arange(ids.shape[0])[:, None]

    def written() -> Logprobs:
        logp = jax.nn.log_softmax(logits().astype(jnp.float32), axis=-1)
        values, likeliest = lax.top_k(logp, logprobs.ids.shape[-1])
        chosen = jnp.take_along_axis(logp, ids[..., None], axis=-1)[..., 0]
        return Logprobs(
            wanted=logprobs.wanted,
            chosen=logprobs.chosen.at[rows, slot].set(chosen, mode="drop"),
            ids=logprobs.ids.at[rows, slot].set(likeliest.astype(jnp.int32), mode="drop"),
            values=logprobs.values.at[rows, slot].set(values, mode="drop"),
        )

    return lax.cond(jnp.any(logprobs.wanted), written, lambda: logprobs)
