"""Stop strings: where an answer's text ends, whatever tokens spell the string."""

import bisect
from collections.abc import Callable, Sequence


def cut_at_stop(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], stops: Sequence[str]
) -> tuple[str, int, bool]:
    """The text before the first stop string, the tokens that it took, and whether there was one.

    The first token that completes a stop string ends the answer; of several strings that are
    complete by then, the one that begins first ends the text. As in vLLM the string itself is left
    out of the text, while the tokens that complete it count.
    """
    text = decode(ids)
    if not any(stop in text for stop in stops):
        return text, len(ids), False
    # Once a prefix of the ids spells a stop string, every longer prefix does.
    counts = range(1, len(ids) + 1)
    spelled = bisect.bisect_left(
        counts, True, key=lambda count: any(stop in decode(ids[:count]) for stop in stops)
    )
    text = decode(ids[: counts[spelled]])
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return text[: min(places)], counts[spelled], True
