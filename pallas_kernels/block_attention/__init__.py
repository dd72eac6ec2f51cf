"""Attention of a block of new tokens to a cached context and to the block itself.

One operation serves drafting (both directions inside the block), verification and chunked
prefill (causal inside the block) and draft training (many blocks over one context, by `vmap`).
"""

from pallas_kernels.block_attention.reference import block_attention

__all__ = ["block_attention"]
