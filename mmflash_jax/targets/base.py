"""What every target offers: the seam between a model family and the decoding loop.

A target is a plan (frozen, hashable: config and dtype); its parameters travel beside it as a
nested dict. One file per family implements `Target`; `targets/__init__.py` names them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from mmflash_jax.layers.cache import CachedKeys
from mmflash_jax.layers.schema import Params
from mmflash_jax.weights import Rule
from pallas_kernels import Kernels

Cache = Any
Embedded = Any
"""What `embed` gives and a pass takes: the stream `[B, T, D]`, or a pytree that holds it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TargetOutput:
    """Result of one target pass over T tokens a row.

    hidden: `[B, T, D]` after the final norm, what `logits` takes.
    features: `[B, T, captured * D]` raw outputs of the captured layers, in the asked order; for
        `AFTER_NORM` (layers/capture.py) it is `hidden`.
    cache: after `prefill`, valid for exactly the real tokens; after `forward`, uncommitted.
    """

    hidden: Array
    features: Array
    cache: Cache


class Target(Protocol):
    """A vision-language model that can be decoded speculatively."""

    SHARDING: ClassVar[tuple[tuple[str, tuple[str | None, ...]], ...]]
    """Ordered (regular expression of the dotted path, mesh axis of each dimension)."""

    @property
    def config(self) -> Any:
        """The family's own, with at least `vocab_size`, `hidden_size`, `num_hidden_layers`,
        `max_position_embeddings` and `image_token_id`."""
        ...

    @property
    def dtype(self) -> str: ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def position_axes(self) -> int:
        """Axes of a rotary position (1, or 3 for M-RoPE)."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Regular expressions of checkpoint tensors that are accepted and not used."""
        ...

    @property
    def image_side(self) -> int:
        """Side of the square of patches that becomes one token."""
        ...

    @property
    def image_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids that the prompt gets before and after each image's tokens, besides what the chat
        template writes."""
        ...

    @property
    def image_settings(self) -> Mapping[str, Any]:
        """Attributes that the checkpoint's image processor must have for this tower."""
        ...

    def unpack_image(self, made: Mapping[str, Any]) -> tuple[np.ndarray, int, int]:
        """Patches, rows and columns of one image that the image processor has made.

        Patches are fp32 `[rows * columns, C]` in the order that `encode_images` takes.
        """
        ...

    def abstract_params(self) -> Params:
        """Nested dict of shapes and dtypes."""
        ...

    def weight_rules(self) -> list[Rule]: ...

    def prompt_positions(
        self, ids: np.ndarray, grids: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, int]:
        """Rotary positions `[A, P]` of a prompt and the shift of every token after it."""
        ...

    def encode_images(
        self,
        params: Params,
        patches: Float[Array, "I P C"],
        rows: Int[Array, " I"],
        columns: Int[Array, " I"],
    ) -> Float[Array, "I M D"]:
        """Media features of padded images; `rows`, `columns` count patches."""
        ...

    def embed(
        self,
        params: Params,
        ids: Int[Array, "B T"],
        media: Float[Array, "M D"] | None = None,
        media_idx: Int[Array, "B T"] | None = None,
    ) -> Embedded:
        """Input embeddings, media rows in place of tokens whose `media_idx` is not negative."""
        ...

    def embed_raw(
        self,
        params: Params,
        ids: Int[Array, "B T"],
        media: Float[Array, "M D"] | None = None,
        media_idx: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Rows of the token table without any scale: what a draft receives. Media rows are such
        that the target's scale, if it has one, makes them what `embed` gives."""
        ...

    def logits(self, params: Params, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        """fp32 logits, soft cap and tying included."""
        ...

    def head(self, params: Params) -> Float[Array, "V D"]:
        """The table of the output head, which a draft borrows. `logits` are an increasing function
        of the products with it (`pallas_kernels.product.logits`)."""
        ...

    def init_cache(self, batch: int, capacity: int, block: int) -> Cache:
        """Empty cache for `capacity` tokens a row and blocks of `block` tokens."""
        ...

    def prefill(
        self,
        params: Params,
        x: Embedded,
        positions: Int[Array, "A B T"],
        cache: Cache,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        *,
        capture: tuple[int, ...],
    ) -> TargetOutput:
        """Run decided tokens: `count` of T are real and enter the cache at `length`."""
        ...

    def forward(
        self,
        params: Params,
        x: Embedded,
        positions: Int[Array, "A B T"],
        cache: Cache,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        *,
        capture: tuple[int, ...],
        parents: Int[Array, "B T"] | None = None,
    ) -> TargetOutput:
        """Run a drafted block; none of it counts until `commit` says how many tokens stay.

        With `parents` the block is a tree (`pallas_kernels.tree`): every node is run as the last
        token of its branch alone, at `length` plus its depth; `positions` say so already. Nothing
        of it is written, so the result's cache fits `commit` only.
        """
        ...

    def commit(
        self, cache: Cache, keep: Int[Array, " B"], path: Int[Array, "B P"] | None = None
    ) -> Cache:
        """Keep the first `keep` tokens of the block that `forward` ran last.

        Of a tree they are the first nodes of `path`, each the parent of the next. The cache is then
        that of these tokens run as a chain. Entries behind `keep` may be any nodes.
        """
        ...

    def keys_values(self, cache: Cache, kind: str) -> CachedKeys:
        """What the last layer of a kind ("full_attention", "sliding_attention") reads of committed
        tokens, for a draft without keys of its own."""
        ...
