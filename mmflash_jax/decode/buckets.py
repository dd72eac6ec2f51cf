"""Padding sizes: few enough that the number of compiled programs stays small."""


def bucket(count: int, smallest: int) -> int:
    """The smallest of `smallest * {1, 1.5, 2, 3, 4, 6, ...}` that holds `count`.

    Half steps keep the padding under a half; `smallest` should be even.
    """
    size = smallest
    while size < count:
        size, half = 2 * size, size + size // 2
        if half >= count:
            return half
    return size


def chunk_widths(length: int, *, widest: int, smallest: int = 32) -> list[int]:
    """Widths of the prefill chunks of `length` tokens: full chunks, then a bucket for the rest."""
    full, rest = divmod(length, widest)
    return [widest] * full + ([min(bucket(rest, smallest), widest)] if rest else [])
