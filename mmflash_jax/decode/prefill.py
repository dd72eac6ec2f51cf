"""From prompts to a `DecodeState`: image features, chunks of prompt tokens, the first token.

Prompts are padded on the right to a common width. Padding enters no cache and no recurrent
state, so a row decodes the same whatever stands beside it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mmflash_jax.decode.accept import cut
from mmflash_jax.decode.adjust import (
    NEUTRAL,
    Adjustments,
    count_tokens,
    gather_adjustments,
)
from mmflash_jax.decode.buckets import bucket, chunk_widths
from mmflash_jax.decode.logprobs import no_logprobs, note
from mmflash_jax.decode.records import ABSENT, RUNNING, DecodeState, PatchedImage, Plan, Prompt
from mmflash_jax.decode.sampling import GREEDY, Sampling, choose, gather
from mmflash_jax.drafters import Context
from mmflash_jax.layers.schema import Params
from mmflash_jax.layers.scores import Scores

CHUNK = 512
IMAGES_AT_ONCE = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefillState:
    """Caches while chunks go in, and the hidden state `[B, D]` of each prompt's last token."""

    cache: Any
    draft: Any
    last: Array


def prefill(
    plan: Plan,
    params: Params,
    prompts: Sequence[Prompt | None],
    *,
    capacity: int,
    room: int | None = None,
    chunk: int = CHUNK,
) -> DecodeState:
    """Run a batch of prompts and decide each row's first token.

    `None` fills a row that carries no request. `capacity` is the number of cache slots of a row;
    every prompt and what it may generate must fit (the last token needs no slot). `room` is the
    number of generated tokens a row can hold; batches that share it share the compiled loop.

    Raises:
        ValueError: a prompt does not fit the capacity.
    """
    for row, prompt in enumerate(prompts):
        if prompt is not None and len(prompt.ids) + prompt.max_tokens - 1 > capacity:
            raise ValueError(
                f"row {row}: {len(prompt.ids)} prompt tokens and max_tokens {prompt.max_tokens} "
                f"do not fit a cache of {capacity} tokens"
            )
    state = run_prompts(plan, params, prompts, capacity=capacity, chunk=chunk)
    limit = np.array([0 if p is None else p.max_tokens for p in prompts], np.int32)
    shift = np.array([0 if p is None else p.rope_shift for p in prompts], np.int32)
    room = bucket(int(limit.max()), 16) if room is None else room
    sampling = gather([GREEDY if p is None else p.sampling for p in prompts])
    adjustments = wanted = None
    if any(p is not None and p.adjustment != NEUTRAL for p in prompts):
        none = np.zeros(0, np.int32)
        rows = [(NEUTRAL, none) if p is None else (p.adjustment, p.ids) for p in prompts]
        adjustments = gather_adjustments(rows, plan.target.config.vocab_size)
    if any(p is not None and p.logprobs for p in prompts):
        wanted = np.array([p is not None and p.logprobs for p in prompts])
    return first_token(
        plan, params, state.cache, state.draft, state.last, _lengths(prompts), limit, shift,
        sampling, adjustments, wanted, room=room,
    )  # fmt: skip


def run_prompts(
    plan: Plan,
    params: Params,
    prompts: Sequence[Prompt | None],
    *,
    capacity: int,
    chunk: int = CHUNK,
) -> PrefillState:
    """Caches after the prompts, and the hidden state of each prompt's last token."""
    features = encode_media(plan, params, prompts)
    widths = chunk_widths(int(_lengths(prompts).max()), widest=chunk)
    return run_chunks(plan, params, prompts, features, widths, capacity=capacity)


def run_chunks(
    plan: Plan,
    params: Params,
    prompts: Sequence[Prompt | None],
    features: tuple[Array | None, list[list[int]]],
    widths: Sequence[int],
    *,
    capacity: int,
    run: Callable[..., PrefillState] | None = None,
) -> PrefillState:
    """`run_prompts` with image features (`encode_media`) and widths of chunks at hand.

    run: another compiled form of `prefill_chunk`.
    """
    media, first_row = features
    lengths, run = _lengths(prompts), run or prefill_chunk
    ids, media_idx, positions = pad_prompts(plan, prompts, first_row, sum(widths))
    state = empty_prompts(plan, len(prompts), capacity)
    start = 0
    for width in widths:
        here = slice(start, start + width)
        state = run(
            plan, params, state, ids[:, here], media, media_idx[:, here], positions[:, :, here],
            np.minimum(lengths, start), np.clip(lengths - start, 0, width),
        )  # fmt: skip
        start += width
    return state


def _lengths(prompts: Sequence[Prompt | None]) -> np.ndarray:
    return np.array([0 if p is None else len(p.ids) for p in prompts], np.int32)


def encode_media(
    plan: Plan, params: Params, prompts: Sequence[Prompt | None]
) -> tuple[Array | None, list[list[int]]]:
    """Features of all images `[M, D]`, and the first row of each image of each prompt.

    Images of like size share tower calls; sizes and counts are padded to buckets.
    """
    groups: dict[int, list[tuple[int, int, PatchedImage]]] = {}
    first_row = [[0] * len(p.images) if p else [] for p in prompts]
    for row, prompt in enumerate(prompts):
        for place, image in enumerate(prompt.images if prompt else ()):
            size = bucket(len(image.patches), 64)
            groups.setdefault(size, []).append((row, place, image))
    features, rows = [], 0
    for size, members in sorted(groups.items()):
        for at in range(0, len(members), IMAGES_AT_ONCE):
            part = members[at : at + IMAGES_AT_ONCE]
            encoded = encode_image_batch(plan, params, *stack_images([m[2] for m in part], size))
            for slot, (row, place, _) in enumerate(part):
                first_row[row][place] = rows + slot * encoded.shape[1]
            features.append(encoded.reshape(-1, encoded.shape[-1]))
            rows += len(features[-1])
    if not features:
        return None, first_row
    media = jnp.concatenate(features)
    return jnp.pad(media, ((0, bucket(rows, 64) - rows), (0, 0))), first_row


def stack_images(
    images: Sequence[PatchedImage], size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = 1 << (len(images) - 1).bit_length()
    patches = np.zeros((count, size, images[0].patches.shape[1]), np.float32)
    # An absent image has a few patches, so that no row of its attention is empty.
    rows, columns = np.full(count, 2, np.int32), np.full(count, 2, np.int32)
    for slot, image in enumerate(images):
        patches[slot, : len(image.patches)] = image.patches
        rows[slot], columns[slot] = image.rows, image.columns
    return patches, rows, columns


def pad_prompts(
    plan: Plan, prompts: Sequence[Prompt | None], first_row: list[list[int]], width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids `[B, width]`, media rows `[B, width]` and rotary positions `[A, B, width]`."""
    batch = len(prompts)
    ids = np.zeros((batch, width), np.int32)
    media_idx = np.full((batch, width), -1, np.int32)
    positions = np.zeros((plan.target.position_axes, batch, width), np.int32)
    for row, prompt in enumerate(prompts):
        if prompt is None:
            continue
        length = len(prompt.ids)
        ids[row, :length] = prompt.ids
        positions[:, row, :length] = prompt.positions
        places = np.flatnonzero(prompt.media_idx >= 0)
        counts = [image.num_tokens for image in prompt.images]
        rows = [np.arange(n) + at for n, at in zip(counts, first_row[row], strict=True)]
        if rows:
            # `media_idx` counts a prompt's own rows image after image.
            media_idx[row, places] = np.concatenate(rows)[prompt.media_idx[places]]
    return ids, media_idx, positions


@functools.partial(jax.jit, static_argnames=("plan", "batch", "capacity"))
def empty_prompts(plan: Plan, batch: int, capacity: int) -> PrefillState:
    return PrefillState(
        cache=plan.target.init_cache(batch, capacity, plan.drafter.block),
        draft=plan.drafter.init_state(batch, capacity),
        last=jnp.zeros((batch, plan.target.config.hidden_size), jnp.dtype(plan.target.dtype)),
    )


@functools.partial(jax.jit, static_argnames="plan")
def encode_image_batch(
    plan: Plan,
    params: Params,
    patches: Float[Array, "I P C"],
    rows: Int[Array, " I"],
    columns: Int[Array, " I"],
) -> Float[Array, "I M D"]:
    return plan.target.encode_images(params["target"], patches, rows, columns)


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def prefill_chunk(
    plan: Plan,
    params: Params,
    state: PrefillState,
    ids: Int[Array, "B T"],
    media: Float[Array, "M D"] | None,
    media_idx: Int[Array, "B T"],
    positions: Int[Array, "A B T"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
) -> PrefillState:
    """Run the next T tokens of every prompt; `count` of a row's are real."""
    out = plan.target.prefill(
        params["target"],
        plan.target.embed(params["target"], ids, media, media_idx),
        positions,
        state.cache,
        length,
        count,
        capture=plan.drafter.capture,
    )
    last = jnp.take_along_axis(out.hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    context = Context(
        features=out.features,
        rows=plan.target.embed_raw(params["target"], ids, media, media_idx),
        positions=positions,
        length=length,
        count=count,
    )
    return PrefillState(
        cache=out.cache,
        draft=plan.drafter.absorb(params["drafter"], state.draft, context),
        last=jnp.where(count[:, None] > 0, last, state.last),
    )


@functools.partial(jax.jit, static_argnames=("plan", "room"), donate_argnames=("cache", "draft"))
def first_token(
    plan: Plan,
    params: Params,
    cache: Any,
    draft: Any,
    last: Float[Array, "B D"],
    length: Int[Array, " B"],
    limit: Int[Array, " B"],
    rope_shift: Int[Array, " B"],
    sampling: Sampling | None,
    adjustments: Adjustments | None = None,
    wanted: Bool[Array, " B"] | None = None,
    *,
    room: int,
) -> DecodeState:
    """The state after the prompt: the first token is known, but in no cache.

    `wanted` are rows that ask for log-probabilities.
    """
    batch = length.shape[0]
    zero = jnp.zeros((batch,), jnp.int32)
    logits = plan.tokens_only(plan.target.logits(params["target"], last))[:, None]
    place = zero[:, None]
    first = choose(Scores.of(logits), sampling, place, adjustments)
    logprobs = None if wanted is None else no_logprobs(wanted, room, logits.shape[-1])
    anchor = first[:, 0]
    start = DecodeState(
        tokens=jnp.zeros((batch, room), jnp.int32).at[:, 0].set(anchor),
        num_tokens=zero,
        limit=limit,
        anchor=anchor,
        length=length,
        rope_shift=rope_shift,
        reason=jnp.where(limit > 0, RUNNING, ABSENT),
        steps=zero,
        committed=jnp.zeros((batch, plan.drafter.block), jnp.int32),
        drafted=jnp.zeros((batch, room), bool),
        cache=cache,
        draft=draft,
        sampling=sampling,
        adjustments=count_tokens(adjustments, first, zero + 1),
        logprobs=note(logprobs, lambda: logits, first, place),
    )
    decided = cut(start, first, zero + 1, plan.stop_ids)
    return dataclasses.replace(start, num_tokens=decided.count, reason=decided.reason)


def extend(prompt: Prompt, known: Sequence[int]) -> Prompt:
    """The prompt with tokens after it that are known already."""
    count, length = len(known), len(prompt.ids)
    index = np.arange(length, length + count, dtype=np.int32) + prompt.rope_shift
    later = np.broadcast_to(index, (prompt.positions.shape[0], count))
    return dataclasses.replace(
        prompt,
        ids=np.concatenate([prompt.ids, np.asarray(known, np.int32)]),
        media_idx=np.concatenate([prompt.media_idx, np.full(count, -1, np.int32)]),
        positions=np.concatenate([prompt.positions, later.astype(np.int32)], axis=1),
    )
