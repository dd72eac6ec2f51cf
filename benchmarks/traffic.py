"""Bytes that a decoding step must move, and operations that it must do."""

from typing import Any

import jax

from mmflash_jax.decode.records import Plan
from mmflash_jax.drafters import DFlash, Eagle3, Gemma4Assistant, NoDraft, Qwen35MTP
from mmflash_jax.layers.cache import AttentionCache
from mmflash_jax.layers.schema import Params, leaves_with_path

# Copying on an H200: bytes read and written a second, measured. Its data sheet says 4.8e12.
BANDWIDTH = 4.3e12
# Dense bf16 of an H200's tensor cores, from its data sheet.
OPERATIONS = 989e12


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


def operations(plan: Plan, params: Params, state: Any, context: float) -> float:
    """Operations of a step of plain decoding or of a block draft: of products with weights and of
    attention; the recurrence's are below 1 % and left out."""
    block, drafted = plan.drafter.block, not isinstance(plan.drafter, NoDraft)
    batch = state.length.shape[0]
    config = plan.target.config
    head = config.vocab_size * config.hidden_size
    # The head, whether it is a matrix of its own or the table, and what text only looks up.
    apart = ("visual", "embed_tokens", "embed_tokens_per_layer", "lm_head")
    weights = sum(
        leaf.size
        for path, leaf in leaves_with_path(params["target"])
        if leaf.ndim == 2 and path[0] not in apart
    )
    total = 2.0 * batch * block * (weights + head)
    if drafted:
        for path, leaf in leaves_with_path(params["drafter"]):
            # Keys and values are made of the block and of the accepted context.
            twice = path[-2] in ("k_proj", "v_proj")
            total += 2 * batch * block * leaf.size * (2 if twice else 1) * (leaf.ndim == 2)
        total += 2 * batch * (block - 1) * head
    # Every byte of a bf16 cache meets every query row of its group: 2 operations an element.
    group = config.num_attention_heads // _kv_heads(config)
    caches = context_bytes(plan, state, context) - _recurrent(state)
    return total + 2 * block * group * caches / 2


def _kv_heads(config: Any) -> int:
    layers = getattr(config, "layers", None)
    return layers[0].kv_heads if layers else config.num_key_value_heads


def _recurrent(state: Any) -> int:
    leaves = jax.tree.leaves([layer for layer in state.cache.layers if not hasattr(layer, "k")])
    return 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
