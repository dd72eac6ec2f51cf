"""Multimodal speculative decoding in JAX: DFlash/MMFlash drafts for vision-language targets."""

__version__ = "0.1.0"
