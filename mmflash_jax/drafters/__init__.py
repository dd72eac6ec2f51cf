"""Draft methods by the architecture name that a draft's `config.json` gives."""

from mmflash_jax.drafters.base import Anchor, Context, Drafter, FitError, Heads, Proposal
from mmflash_jax.drafters.dflash import DFlash
from mmflash_jax.drafters.none import NoDraft

# The second name is what the speculators library gives where it made no model yet.
DRAFTERS = {"DFlashDraftModel": DFlash, "DFlashSpeculator": DFlash}

__all__ = [
    "DRAFTERS",
    "Anchor",
    "Context",
    "DFlash",
    "Drafter",
    "FitError",
    "Heads",
    "NoDraft",
    "Proposal",
]
