"""A running batch whose rows come and go: the state behind a server.

A prompt is prefilled on its own, piece by piece, as a batch of one row; `insert` writes that row
into a free slot of the running state; `run` decodes a few steps; `release` frees a slot. All
shapes are fixed by `Shape`, so a server compiles each of these once.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from mmflash_jax.decode.adjust import NEUTRAL, gather_adjustments
from mmflash_jax.decode.logprobs import no_logprobs
from mmflash_jax.decode.prefill import (
    PrefillState,
    empty_prompts,
    encode_image_batch,
    first_token,
    pad_prompts,
    prefill_chunk,
    stack_images,
)
from mmflash_jax.decode.records import ABSENT, DecodeState, PatchedImage, Plan, Prompt
from mmflash_jax.decode.sampling import GREEDY, pack
from mmflash_jax.decode.step import step
from mmflash_jax.drafters.narrowed import Narrowed
from mmflash_jax.layers.schema import Params


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Every size that a server's programs are compiled for.

    slots: rows that decode at once.
    capacity: tokens of a row, prompt and answer.
    steps: most verify steps of one `run`, which may be given fewer.
    widths: tokens of a prefill chunk, narrowest first; the last chunk of a prompt takes the
        narrowest that holds it.
    image_sizes: patches that images are padded to, smallest first.
    paces: (rows, width) that `run` is compiled for: how many of the first slots run, and how many
        tokens of a block are verified. One of them runs all slots. Empty: all slots, whole blocks.
    """

    slots: int
    capacity: int
    steps: int = 16
    widths: tuple[int, ...] = (32, 128, 512)
    image_sizes: tuple[int, ...] = ()
    paces: tuple[tuple[int, int], ...] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Emission:
    """What `run` tells the host; rows are slots.

    ids: int32 `[B, W]`, the tokens that earlier runs have not told; the last count is `num_tokens`.
    drafted: bool `[B, W]`, which of them are accepted drafts.
    chosen, likeliest, values: their log-probabilities and the likeliest tokens' (`Logprobs`).
    num_tokens, reason, steps, committed: as in `DecodeState`.
    """

    ids: Array
    drafted: Array
    chosen: Array
    likeliest: Array
    values: Array
    num_tokens: Array
    reason: Array
    steps: Array
    committed: Array


def start_row(
    plan: Plan, params: Params, filled: PrefillState, prompt: Prompt, room: int
) -> DecodeState:
    """A batch of one row, ready for `insert`: prompt in the caches, first token known."""
    return first_token(
        plan, params, filled.cache, filled.draft, filled.last,
        np.array([len(prompt.ids)], np.int32),
        np.array([prompt.max_tokens], np.int32),
        np.array([prompt.rope_shift], np.int32),
        pack([prompt.sampling]),
        gather_adjustments([(prompt.adjustment, prompt.ids)], plan.target.config.vocab_size),
        np.array([prompt.logprobs]),
        room=room,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("plan", "shape"))
def empty_slots(plan: Plan, shape: Shape) -> DecodeState:
    """A state whose slots are all free."""
    B, N, V = shape.slots, shape.capacity, plan.target.config.vocab_size
    zero, nothing = jnp.zeros((B,), jnp.int32), np.zeros(0, np.int32)
    return DecodeState(
        tokens=jnp.zeros((B, N), jnp.int32),
        num_tokens=zero,
        limit=zero,
        anchor=zero,
        length=zero,
        rope_shift=zero,
        reason=jnp.full((B,), ABSENT, jnp.int32),
        steps=zero,
        committed=jnp.zeros((B, plan.drafter.block), jnp.int32),
        drafted=jnp.zeros((B, N), bool),
        cache=plan.target.init_cache(B, N, plan.drafter.block),
        draft=plan.drafter.init_state(B, N),
        sampling=jax.tree.map(jnp.asarray, pack([GREEDY] * B)),
        adjustments=jax.tree.map(jnp.asarray, gather_adjustments([(NEUTRAL, nothing)] * B, V)),
        logprobs=no_logprobs(jnp.zeros((B,), bool), N, V),
    )


def _row_axes(plan: Plan) -> list[int]:
    """The axis of each cache array that counts rows; caches are laid out as their owners like."""

    def shapes(batch: int) -> list[tuple[int, ...]]:
        made = jax.eval_shape(lambda: jax.tree.leaves(_caches(empty_prompts(plan, batch, 64))))
        return [leaf.shape for leaf in made]

    pairs = zip(shapes(2), shapes(3), strict=True)
    differs = ([a == b for a, b in zip(*pair, strict=True)] for pair in pairs)
    return [same.index(False) for same in differs]


def _caches(state: DecodeState | PrefillState) -> tuple[Any, Any]:
    return state.cache, state.draft


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def insert(plan: Plan, state: DecodeState, row: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """Put a batch of one row into a slot; nothing of what was there before stays."""

    def write(leaf: Array, one: Array, axis: int) -> Array:
        return lax.dynamic_update_slice_in_dim(leaf, one.astype(leaf.dtype), slot, axis)

    return _map_rows(plan, write, state, row)


def _map_rows(plan: Plan, change: Callable[..., Array], *states: DecodeState) -> DecodeState:
    """`change(*arrays, axis)` of every array of the states; `axis` is the one that counts rows."""
    structure = jax.tree.structure(_caches(states[0]))
    caches = [jax.tree.leaves(_caches(state)) for state in states]
    changed = map(change, *caches, _row_axes(plan))
    cache, draft = jax.tree.unflatten(structure, changed)
    # Everything else has its rows on the first axis.
    rest = [dataclasses.replace(state, cache=(), draft=()) for state in states]
    return dataclasses.replace(
        jax.tree.map(lambda *leaves: change(*leaves, 0), *rest), cache=cache, draft=draft
    )


@functools.partial(jax.jit, donate_argnames="state")
def release(state: DecodeState, slots: Bool[Array, " B"]) -> DecodeState:
    """Free slots: their rows no longer run, sample or ask for anything."""
    sampling, adjustments, logprobs = state.sampling, state.adjustments, state.logprobs
    if sampling is None or adjustments is None or logprobs is None:
        raise ValueError("a state of slots holds sampling, adjustments and logprobs")
    return dataclasses.replace(
        state,
        reason=jnp.where(slots, ABSENT, state.reason),
        sampling=dataclasses.replace(
            sampling, temperature=jnp.where(slots, 0.0, sampling.temperature)
        ),
        adjustments=dataclasses.replace(adjustments, active=adjustments.active & ~slots),
        logprobs=dataclasses.replace(logprobs, wanted=logprobs.wanted & ~slots),
    )


@functools.partial(
    jax.jit, static_argnames=("plan", "steps", "rows", "width"), donate_argnames="state"
)
def run(
    plan: Plan,
    params: Params,
    state: DecodeState,
    budget: Int[Array, ""] | None = None,
    *,
    steps: int,
    rows: int,
    width: int,
) -> tuple[DecodeState, Emission]:
    """Step until a row ends, none runs or `steps` are taken; tell what each row gained.

    `budget` allows fewer steps than `steps`, for which an emission has room.

    Only the first `rows` slots run, and only the first `width` tokens of a block are verified: few
    requests should not pay for many rows, nor many rows for drafts that are not accepted. A row
    that ended on its way in, with its first token, is told too.
    """
    if width < plan.drafter.block:
        plan = dataclasses.replace(plan, drafter=Narrowed(plan.drafter, width))
    if rows == state.reason.shape[0]:
        return _run(plan, params, state, budget, steps)
    part = _map_rows(plan, lambda leaf, axis: lax.slice_in_dim(leaf, 0, rows, axis=axis), state)
    part, emission = _run(plan, params, part, budget, steps)

    def put_back(leaf: Array, one: Array, axis: int) -> Array:
        return lax.dynamic_update_slice_in_dim(leaf, one, 0, axis)

    return _map_rows(plan, put_back, state, part), emission


def _run(
    plan: Plan, params: Params, state: DecodeState, budget: Array | None, steps: int
) -> tuple[DecodeState, Emission]:
    # A row that has taken no step yet has not been told of either; only a warm-up takes none.
    since = jnp.where(state.steps == 0, 0, state.num_tokens)
    most = steps if budget is None else jnp.minimum(budget, steps)

    def more(carry: tuple[Array, DecodeState]) -> Array:
        taken, now = carry
        return (taken < most) & jnp.any(now.running) & jnp.all(now.reason == state.reason)

    def once(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        taken, now = carry
        return taken + 1, step(plan, params, now)

    state = lax.while_loop(more, once, (jnp.int32(0), state))[1]
    # The first token comes from the prompt, at most a block from each step.
    place = since[:, None] + jnp.arange(steps * plan.drafter.block + 1)
    place = jnp.minimum(place, state.tokens.shape[1] - 1)
    logprobs = state.logprobs
    if logprobs is None:
        raise ValueError("a state of slots holds logprobs")
    emission = Emission(
        ids=jnp.take_along_axis(state.tokens, place, axis=1),
        drafted=jnp.take_along_axis(state.drafted, place, axis=1),
        chosen=jnp.take_along_axis(logprobs.chosen, place, axis=1),
        likeliest=jnp.take_along_axis(logprobs.ids, place[..., None], axis=1),
        values=jnp.take_along_axis(logprobs.values, place[..., None], axis=1),
        num_tokens=state.num_tokens,
        reason=state.reason,
        steps=state.steps,
        committed=state.committed,
    )
    return state, emission


@functools.partial(jax.jit, static_argnames=("plan", "rows"))
def _no_media(plan: Plan, rows: int) -> Array:
    return jnp.zeros((rows, plan.target.config.hidden_size), jnp.dtype(plan.target.dtype))


@functools.partial(jax.jit, donate_argnames="media")
def _place_media(media: Array, features: Array, row: Int[Array, ""]) -> Array:
    return lax.dynamic_update_slice_in_dim(media, features.astype(media.dtype), row, 0)


@dataclass(frozen=True)
class Pieces:
    """Prefills prompts one piece (an image or a chunk of tokens) at a time, in fixed shapes."""

    plan: Plan
    params: Params
    shape: Shape
    no_media: Array

    @classmethod
    def of(cls, plan: Plan, params: Params, shape: Shape) -> "Pieces":
        # Features are written in whole buckets, the last one past the tokens of its image.
        padding = max(shape.image_sizes, default=0) // plan.target.image_side**2
        return cls(plan, params, shape, _no_media(plan, shape.capacity + padding))

    def prefill(self, prompt: Prompt) -> Iterator[tuple[int, DecodeState | None]]:
        """Work on a prompt; after each piece, its tokens and None, at last the row to insert."""
        plan, params = self.plan, self.params
        # The shared blank must not be donated.
        media = _no_media(plan, len(self.no_media)) if prompt.images else self.no_media
        row = 0
        first_row: list[int] = []
        for image in prompt.images:
            media = _place_media(media, self._encode(image), np.int32(row))
            first_row.append(row)
            row += image.num_tokens
            yield image.num_tokens, None
        length = len(prompt.ids)
        widths = self._widths(length)
        ids, media_idx, positions = pad_prompts(plan, [prompt], [first_row], sum(widths))
        state = empty_prompts(plan, 1, self.shape.capacity)
        start = 0
        for width in widths:
            here = slice(start, start + width)
            count = min(length - start, width)
            state = prefill_chunk(
                plan, params, state, ids[:, here], media, media_idx[:, here],
                positions[:, :, here], np.array([start], np.int32), np.array([count], np.int32),
            )  # fmt: skip
            start += width
            if start < length:
                yield width, None
        yield widths[-1], start_row(plan, params, state, prompt, self.shape.capacity)

    def _encode(self, image: PatchedImage) -> Array:
        size = fit(len(image.patches), self.shape.image_sizes)
        return encode_image_batch(self.plan, self.params, *stack_images([image], size))[0]

    def _widths(self, length: int) -> list[int]:
        full, rest = divmod(length, self.shape.widths[-1])
        widths = [self.shape.widths[-1]] * full
        return widths + ([fit(rest, self.shape.widths)] if rest else [])


def fit(count: int, sizes: Sequence[int]) -> int:
    """The smallest of ascending sizes that holds `count`.

    Raises:
        ValueError: none does.
    """
    for size in sizes:
        if size >= count:
            return size
    raise ValueError(f"{count} is more than the largest size {max(sizes, default=0)}")
