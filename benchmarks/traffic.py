"""Bytes that a decoding step must move."""

from typing import Any

import jax

from mmflash_jax.decode.records import Plan
from mmflash_jax.drafters import DFlash, Eagle3, Gemma4Assistant, NoDraft, Qwen35MTP
from mmflash_jax.layers.cache import AttentionCache
from mmflash_jax.layers.schema import Params, leaves_with_path

# Copying on an H200: bytes read and written a second, measured. Its data sheet says 4.8e12.
BANDWIDTH = 4.3e12


def size_of(leaf: Any) -> int:
    """Bytes of an array or of its shape."""
    return leaf.size * leaf.dtype.itemsize


def draft_runs(drafter: Any) -> int:
    """How often a step runs the draft: once for a block, once a token of a chain or a level."""
    if isinstance(drafter, NoDraft):
        return 0
    if isinstance(drafter, DFlash):
        return 1
    if isinstance(drafter, Eagle3) and drafter.top_k > 1:
        return min(drafter.depth, drafter.draft_tokens)
    return drafter.block - 1


def weight_bytes(plan: Plan, params: Params) -> int:
    """Bytes of weights that a step streams: every matrix once, the draft's at each of its runs.

    So is the output head where the draft borrows it. Tables that a step only looks rows up in, and
    the image tower, do not count.
    """
    drafter, runs = plan.drafter, draft_runs(plan.drafter)
    borrowed = runs if isinstance(drafter, DFlash | Qwen35MTP) else 0
    head = "lm_head" if "lm_head" in params["target"] else "embed_tokens"
    total = 0
    for path, leaf in leaves_with_path(params["target"]):
        name = str(path[0])
        if name == head:
            total += size_of(leaf) * (1 + borrowed)
        elif name not in ("visual", "embed_tokens_per_layer", "embed_tokens"):
            total += size_of(leaf)
    for path, leaf in leaves_with_path(params["drafter"]):
        name = str(path[0])
        if isinstance(drafter, Gemma4Assistant) and name in ("embed_tokens", "token_ordering"):
            continue
        # EAGLE-3 joins the target's features once, when it absorbs.
        total += size_of(leaf) * (1 if name == "fc" and isinstance(drafter, Eagle3) else runs)
    return total


def context_bytes(plan: Plan, state: Any, context: float) -> int:
    """Bytes of caches that a step must read, and of recurrent states read and written."""

    def of(cache: AttentionCache) -> float:
        slots = cache.k.shape[2]
        return 2 * size_of(cache.k) * min(context, slots) / slots

    caches = list(state.cache.layers)
    layers: Any = getattr(plan.target.config, "layers", ())
    sources = [layer.source for layer in layers]
    if sources:
        # Layers that share keys read them again.
        makers = [index for index, source in enumerate(sources) if source == index]
        caches = [caches[makers.index(source)] for source in sources]
    total = 0.0
    for cache in caches:
        if isinstance(cache, AttentionCache):
            total += of(cache)
        else:
            total += 2 * sum(size_of(leaf) for leaf in jax.tree.leaves(cache))
    read: list[AttentionCache] = []
    if isinstance(plan.drafter, DFlash):
        pairs = zip(state.draft.k, state.draft.v, strict=True)
        read = [AttentionCache(k=k, v=v) for k, v in pairs]
    elif isinstance(plan.drafter, Gemma4Assistant):
        # Its layers read the target's last layer of their kind.
        last = {layer.window is None: cache for layer, cache in zip(layers, caches, strict=True)}
        read = [last[layer.window is None] for layer in plan.drafter.config.layers]
    elif not isinstance(plan.drafter, NoDraft):
        read = [state.draft.cache]
    return int(total + draft_runs(plan.drafter) * sum(of(cache) for cache in read))
