"""Draft methods by the architecture name that a draft's `config.json` gives."""

from mmflash_jax.drafters.base import Anchor, Chain, Context, Drafter, FitError, Heads, Proposal
from mmflash_jax.drafters.dflash import DFlash
from mmflash_jax.drafters.eagle3 import Eagle3
from mmflash_jax.drafters.gemma4_assistant import Gemma4Assistant
from mmflash_jax.drafters.mtp_qwen35 import Qwen35MTP
from mmflash_jax.drafters.none import NoDraft

DRAFTERS = {
    "DFlashDraftModel": DFlash,
    # What the speculators library gives where it made no model yet.
    "DFlashSpeculator": DFlash,
    # Checkpoints of one method under many names: speculators' two, SpecForge's, vLLM's, and
    # EAGLE's own, which says Llama.
    "Eagle3DraftModel": Eagle3,
    "Eagle3LlamaForCausalLM": Eagle3,
    "Eagle3Speculator": Eagle3,
    "LlamaForCausalLM": Eagle3,
    "LlamaForCausalLMEagle3": Eagle3,
    "Gemma4AssistantForCausalLM": Gemma4Assistant,
    # A target's own folder holds its MTP head.
    "Qwen3_5ForConditionalGeneration": Qwen35MTP,
}

__all__ = [
    "DRAFTERS",
    "Anchor",
    "Chain",
    "Context",
    "DFlash",
    "Drafter",
    "Eagle3",
    "FitError",
    "Gemma4Assistant",
    "Heads",
    "NoDraft",
    "Proposal",
    "Qwen35MTP",
]
