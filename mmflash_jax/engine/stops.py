"""Stop strings: where an answer's text ends, whatever tokens spell the string."""

import bisect
from collections.abc import Callable, Sequence


def cut_at_stop(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], stops: Sequence[str]
) -> tuple[str, int, bool]:
    """The text before the first stop string, the tokens that it took, and whether there was one.

    Of several stop strings the one that begins first in the text ends it. As in vLLM the string
    itself is left out of the text, while the tokens that complete it count.
    """
    text = decode(ids)
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    if not places:
        return text, len(ids), False
    # Once a prefix of the ids spells a stop string, every longer prefix does.
    counts = range(1, len(ids) + 1)
    spelled = bisect.bisect_left(
        counts, True, key=lambda count: any(stop in decode(ids[:count]) for stop in stops)
    )
    return text[: min(places)], counts[spelled], True
