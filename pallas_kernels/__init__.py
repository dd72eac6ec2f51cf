"""Array operations that decide decoding speed, one folder each.

Every folder holds the public function (`__init__.py`), its reference mathematics in plain
`jax.numpy` (`reference.py`), which is right on every backend, a kernel (`gpu.py`) and inputs on
which the two are compared (`cases.py`). `choose.py` says which of them runs, `norm.py` what an RMS
norm is, `product.py` and `parts.py` how rows are multiplied, `tree.py` what a tree of drafts is,
`tiles.py` what kernels cut their work into, `hopper.py` how many rows are multiplied on one kind of
card. The package imports nothing of `mmflash_jax`.
"""

from pallas_kernels.attention_heads import (
    HeadRows,
    Slots,
    apply_rotary,
    attention_heads,
    write_rows,
)
from pallas_kernels.block_attention import block_attention
from pallas_kernels.choose import KernelError, Kernels
from pallas_kernels.gated_delta import (
    commit_gated_delta,
    gated_delta_block,
    gated_delta_chunked,
    gated_delta_sequential,
    gated_delta_step,
    gated_delta_tree,
)
from pallas_kernels.likeliest import likeliest
from pallas_kernels.norm import Norm, rms_norm, rms_normalise
from pallas_kernels.residual_norm import residual_norm
from pallas_kernels.tree import ancestors_of, depths_of

__all__ = [
    "HeadRows",
    "KernelError",
    "Kernels",
    "Norm",
    "Slots",
    "ancestors_of",
    "apply_rotary",
    "attention_heads",
    "block_attention",
    "commit_gated_delta",
    "depths_of",
    "gated_delta_block",
    "gated_delta_chunked",
    "gated_delta_sequential",
    "gated_delta_step",
    "gated_delta_tree",
    "likeliest",
    "residual_norm",
    "rms_norm",
    "rms_normalise",
    "write_rows",
]
