"""The gated delta rule in the three forms that serving needs, and the commit of a block.

Yang et al., "Gated Delta Networks" (arXiv 2412.06464); the layer around it follows
transformers 5.24 `models/qwen3_5/modeling_qwen3_5.py`.
"""

from pallas_kernels.gated_delta.reference import (
    commit_gated_delta,
    gated_delta_block,
    gated_delta_chunked,
    gated_delta_sequential,
)

__all__ = [
    "commit_gated_delta",
    "gated_delta_block",
    "gated_delta_chunked",
    "gated_delta_sequential",
]
