"""Telling requests what a run of the loop gained them, or that it cannot."""

import logging
from typing import Any

import jax
import numpy as np

from mmflash_jax.decode.records import FINISH_REASONS
from mmflash_jax.decode.slots import Emission
from mmflash_jax.engine.metrics import Metrics
from mmflash_jax.engine.tickets import Ticket, TokenLogprobs, Update

log = logging.getLogger(__name__)


def to_host(emission: Emission, logprobs: bool) -> Any:
    """The emission as numpy arrays; log-probabilities only if somebody asked for them."""
    wanted = {
        name: value
        for name, value in vars(emission).items()
        if logprobs or name not in ("chosen", "likeliest", "values")
    }
    return Emission(**{**vars(emission), **jax.device_get(wanted)})


def tell(ticket: Ticket, slot: int, told: Emission, metrics: Metrics) -> bool:
    """Deliver what a row gained; whether it has ended."""
    new = int(told.num_tokens[slot]) - ticket.seen
    reason = FINISH_REASONS.get(int(told.reason[slot]))
    if not new and reason is None:
        return False
    logprobs = ()
    if ticket.prompt.logprobs:
        parts = zip(told.chosen[slot], told.likeliest[slot], told.values[slot], strict=True)
        logprobs = tuple(
            TokenLogprobs(chosen=float(chosen), ids=ids, values=values)
            for chosen, ids, values in list(parts)[:new]
        )
    committed = np.asarray(told.committed[slot])
    metrics.gained(ticket, new, committed)
    ticket.seen += new
    ticket.committed = committed
    if reason is not None:
        # Before the answer is out: who has it may read the counters.
        metrics.finished(reason)
    _deliver(
        ticket,
        Update(
            ids=tuple(int(id) for id in told.ids[slot, :new]),
            drafted=tuple(bool(kept) for kept in told.drafted[slot, :new]),
            logprobs=logprobs,
            finish_reason=reason,
            steps=int(told.steps[slot]),
            committed=tuple(int(count) for count in committed),
        ),
    )
    return reason is not None


def fail(ticket: Ticket, metrics: Metrics, why: str) -> None:
    """Deliver the end of a request that cannot go on."""
    metrics.finished("error")
    _deliver(ticket, Update(finish_reason="error", error=why))


def _deliver(ticket: Ticket, update: Update) -> None:
    """Hand over an update; a receiver that is gone ends its own request only."""
    try:
        ticket.deliver(update)
    except Exception:
        log.exception("an update could not be delivered")
        ticket.cancelled = True
