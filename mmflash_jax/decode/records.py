"""Records of decoding. No logic: what each stage hands to the next.

Request -> `Prompt` -> `DecodeState` -> (`Proposal` -> `Verification` -> `Acceptance`) ->
`DecodeState`. Device records are frozen pytrees; `Prompt` and `PatchedImage` hold host arrays.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class PatchedImage:
    """One preprocessed image.

    patches: fp32 `[rows * columns, C]`, in the order of the image processor.
    rows, columns: patches down and across.
    num_tokens: tokens this image takes in the prompt.
    """

    patches: np.ndarray
    rows: int
    columns: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request, ready for the device.

    ids: int32 `[P]`, every image placeholder already expanded.
    media_idx: int32 `[P]`, row of this prompt's own media features, -1 for text.
    positions: int32 `[A, P]`, the target's rotary positions (A axes).
    rope_shift: rotary position minus index of every token after the prompt.
    images: in the order of their placeholders.
    max_tokens: most tokens to generate, at least 1.
    """

    ids: np.ndarray
    media_idx: np.ndarray
    positions: np.ndarray
    rope_shift: int
    images: tuple[PatchedImage, ...]
    max_tokens: int
