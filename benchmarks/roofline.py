"""The two numbers of a decoding step: bytes it must move and operations it must do, from shapes.

    python -m benchmarks.roofline

Prints a Markdown table. Bytes are those of `benchmarks.traffic`: every matrix once, the output head
again for drafts, caches up to the context, recurrent states read and written. Operations are two
for every weight of a product and row, and four for every query, head dimension and key. What was
reached beside these roofs is drawn by `benchmarks.decode_report --plot`.
"""

import itertools

from benchmarks.compiled import Arguments, abstract_decode
from benchmarks.full_size import Family
from benchmarks.traffic import BANDWIDTH, OPERATIONS, context_bytes, operations, weight_bytes

FAMILIES: tuple[Family, ...] = ("qwen35", "gemma4")


def main() -> None:
    print("| target | decoding | batch | GB a step | of it context | floor, ms | T operations |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for family, drafter in itertools.product(FAMILIES, ("dflash", "none")):
        for batch in (1, 8, 32):
            arguments = Arguments(family=family, drafter=drafter, batch=batch)
            plan, params, state = abstract_decode(arguments)
            weights = weight_bytes(plan, params)
            context = context_bytes(plan, state, arguments.context)
            done = operations(plan, params, state, arguments.context)
            moved = weights + context
            floor = 1e3 * max(moved / BANDWIDTH, done / OPERATIONS)
            print(
                f"| {family} | {'drafted' if drafter == 'dflash' else 'plain'} | {batch} "
                f"| {moved / 1e9:.2f} | {context / 1e9:.2f} | {floor:.2f} | {done / 1e12:.2f} |"
            )


if __name__ == "__main__":
    main()
