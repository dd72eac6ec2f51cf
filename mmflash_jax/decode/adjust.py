"""Changes that a request asks for in the target's logits: biases and penalties of repeated tokens.

They act before temperature and filters, in the order of vLLM: bias, repetition, frequency,
presence. Penalties depend on what was said before, and inside a drafted block that is the draft:
place t is scored as if the drafts before it (in a tree: above it) were said. Places up to the first
wrong draft have a true prefix, later ones are thrown away, so the chosen tokens are those of plain
decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """One request's changes; the defaults change nothing.

    presence_penalty: taken off the logit of every token that the answer holds.
    frequency_penalty: taken off for each time that the answer holds it.
    repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or
        answer hold.
    logit_bias: (token id, what is added to its logit).
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        """Refuse values without a meaning.

        Raises:
            ValueError: naming the field, its value and the range.
        """
        biases = [value for _, value in self.logit_bias]
        ranges = {
            "presence_penalty": (-2.0 <= self.presence_penalty <= 2.0, "from -2 to 2"),
            "frequency_penalty": (-2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2"),
            "repetition_penalty": (0.0 < self.repetition_penalty <= 2.0, "above 0, up to 2"),
            "logit_bias": (all(-100.0 <= b <= 100.0 for b in biases), "from -100 to 100"),
        }
        for name, (holds, allowed) in ranges.items():
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}, must be {allowed}")


NEUTRAL = Adjustment()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Adjustments:
    """`Adjustment` of a batch, and what prompt and answer hold.

    active: rows that ask for a change.
    counts: int32 `[B, V]`, how often each token is in the row's answer.
    prompt: bool `[B, V]`, tokens of the row's prompt.
    """

    active: Bool[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    repetition: Float[Array, " B"]
    bias: Float[Array, "B V"]
    prompt: Bool[Array, "B V"]
    counts: Int[Array, "B V"]


def gather_adjustments(
    rows: Sequence[tuple[Adjustment, np.ndarray]], vocabulary: int
) -> Adjustments:
    """The batch's changes as host arrays; each row brings the ids of its prompt."""
    bias = np.zeros((len(rows), vocabulary), np.float32)
    prompt = np.zeros((len(rows), vocabulary), bool)
    for row, (one, ids) in enumerate(rows):
        for id, value in one.logit_bias:
            bias[row, id] = value
        # Image placeholders may lie outside the vocabulary.
        prompt[row, ids[ids < vocabulary]] = True

    def each(name: str) -> np.ndarray:
        return np.array([getattr(one, name) for one, _ in rows], np.float32)

    made = {
        "active": np.array([one != NEUTRAL for one, _ in rows]),
        "presence": each("presence_penalty"),
        "frequency": each("frequency_penalty"),
        "repetition": each("repetition_penalty"),
        "bias": bias,
        "prompt": prompt,
        "counts": np.zeros(bias.shape, np.int32),
    }
    return Adjustments(**made)


def adjust(
    logits: Float[Array, "B T V"],
    adjustments: Adjustments | None,
    drafted: Int[Array, "B drafts"] | None = None,
    before: Bool[Array, "B T drafts"] | None = None,
) -> Float[Array, "B T V"]:
    """Logits as the requests want them; place t counts the first t drafts as said.

    Without `drafted` every place counts the answer so far alone. Where the drafts are a tree,
    `before` says which of them each place counts.
    """
    if adjustments is None:
        return logits
    a = adjustments
    counts = a.counts[:, None]
    if drafted is not None:
        if before is None:
            before = jnp.arange(logits.shape[1])[:, None] > jnp.arange(drafted.shape[1])
        counts = counts + _said_before(drafted, before, logits.shape[2])
    said = counts > 0
    biased = logits + a.bias[:, None]
    penalty = a.repetition[:, None, None]
    repeated = jnp.where(biased > 0, biased / penalty, biased * penalty)
    biased = jnp.where(said | a.prompt[:, None], repeated, biased)
    return biased - a.frequency[:, None, None] * counts - a.presence[:, None, None] * said


def _said_before(
    drafted: Int[Array, "B drafts"], before: Bool[Array, "*#B T drafts"], vocabulary: int
) -> Int[Array, "B T V"]:
    """How often each token is among the drafts before each place."""
    places = before.shape[-2]
    rows = jnp.arange(drafted.shape[0])[:, None, None]
    place = jnp.arange(places)[:, None]
    none = jnp.zeros((drafted.shape[0], places, vocabulary), jnp.int32)
    return none.at[rows, place, drafted[:, None, :]].add(before.astype(jnp.int32))


def count_tokens(
    adjustments: Adjustments | None, ids: Int[Array, "B T"], count: Int[Array, " B"]
) -> Adjustments | None:
    """The first `count` of `ids` join each row's answer."""
    if adjustments is None:
        return None
    rows = jnp.arange(ids.shape[0])[:, None]
    new = (jnp.arange(ids.shape[1]) < count[:, None]).astype(jnp.int32)
    counts = adjustments.counts.at[rows, ids].add(new)
    return Adjustments(**{**vars(adjustments), "counts": counts})
