"""The two numbers of a decoding step: bytes it must move and operations it must do, from shapes.

    python -m benchmarks.roofline

Prints a Markdown table. Bytes are those of `benchmarks.traffic`: every matrix once, the output head
again for drafts, caches up to the context, recurrent states read and written. Operations are two
for every weight of a product and row, and four for every query, head dimension and key.
"""

import itertools
from typing import Any

import jax

from benchmarks.compiled import Arguments, abstract_decode
from benchmarks.full_size import Family
from benchmarks.traffic import BANDWIDTH, context_bytes, weight_bytes
from mmflash_jax.decode.records import Plan
from mmflash_jax.drafters import NoDraft
from mmflash_jax.layers.schema import Params, leaves_with_path

# Dense bf16 of an H200's tensor cores, from its data sheet.
OPERATIONS = 989e12
FAMILIES: tuple[Family, ...] = ("qwen35", "gemma4")


def operations(plan: Plan, params: Params, state: Any, batch: int, context: int) -> float:
    """Of products with weights and of attention; the recurrence's are below 1 % and left out."""
    block, drafted = plan.drafter.block, not isinstance(plan.drafter, NoDraft)
    config = plan.target.config
    head = config.vocab_size * config.hidden_size
    weights = sum(
        leaf.size
        for path, leaf in leaves_with_path(params["target"])
        if path[0] not in ("visual", "embed_tokens", "embed_tokens_per_layer") and leaf.ndim == 2
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


def main() -> None:
    print("| target | decoding | batch | GB a step | of it context | floor, ms | T operations |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for family, drafter in itertools.product(FAMILIES, ("dflash", "none")):
        for batch in (1, 8, 32):
            arguments = Arguments(family=family, drafter=drafter, batch=batch)
            plan, params, state = abstract_decode(arguments)
            weights = weight_bytes(plan, params)
            context = context_bytes(plan, state, arguments.context)
            done = operations(plan, params, state, batch, arguments.context)
            moved = weights + context
            floor = 1e3 * max(moved / BANDWIDTH, done / OPERATIONS)
            print(
                f"| {family} | {'drafted' if drafter == 'dflash' else 'plain'} | {batch} "
                f"| {moved / 1e9:.2f} | {context / 1e9:.2f} | {floor:.2f} | {done / 1e12:.2f} |"
            )


if __name__ == "__main__":
    main()
