"""How many drafts to verify: the width that has given most tokens a second, at this load, lately.

A step that verifies a block costs more than one that does not draft, the more the more rows there
are; what it gains hangs on how many drafts are accepted. Both are measured while serving: seconds a
step for each load and width, and the share of drafts accepted at each place. Ids never depend on
the width.
"""

import numpy as np

TRIALS = 3
"""Turns that a width is tried at each load before it is judged."""
PROBE_EVERY = 64
"""Turns between two looks at a width that is not the best: loads and texts change."""
FADING = 0.98
"""What a step counts once another one has been seen."""
SMOOTHING = 0.2
"""Weight of a new duration in the running mean."""


class Pace:
    """Chooses among `variants`, pairs of (rows, width)."""

    def __init__(self, variants: tuple[tuple[int, int], ...], block: int):
        self._widths: dict[int, list[int]] = {}
        for rows, width in sorted(variants):
            self._widths.setdefault(rows, []).append(width)
        self._seconds: dict[tuple[int, int], float] = {}
        self._seen: dict[tuple[int, int], int] = dict.fromkeys(variants, 0)
        self._turns = dict.fromkeys(self._widths, 0)
        # Steps that verified a draft at each place, and steps that kept it.
        self._tried = np.full(block - 1, 1e-6)
        self._kept = np.full(block - 1, 1e-6)

    def rows(self, needed: int) -> int:
        """The fewest rows to run that hold the first `needed`."""
        return min(rows for rows in self._widths if rows >= needed)

    def width(self, rows: int) -> int:
        """The width of the next turn at this load."""
        widths = self._widths[rows]
        if len(widths) == 1:
            return widths[0]
        self._turns[rows] += 1
        # Widest first: its steps tell about every place.
        for width in reversed(widths):
            if self._seen[rows, width] < TRIALS or (rows, width) not in self._seconds:
                return width
        best = max(widths, key=lambda width: self.tau(width) / self._seconds[rows, width])
        probe, due = divmod(self._turns[rows], PROBE_EVERY)
        return widths[probe % len(widths)] if due == 0 else best

    def seconds(self, rows: int, width: int) -> float | None:
        """What a step has taken lately, None if it is not known yet."""
        return self._seconds.get((rows, width))

    def tau(self, width: int) -> float:
        """Tokens a step that steps of this width have given lately."""
        return 1 + float((self._kept / self._tried)[: width - 1].sum())

    def observe(self, rows: int, width: int, committed: np.ndarray, seconds: float | None) -> None:
        """What a turn showed: steps by the tokens they committed, and seconds a step if known."""
        steps = float(committed.sum())
        if not steps:
            return
        self._seen[rows, width] += 1
        fading, places = FADING**steps, slice(0, width - 1)
        self._tried[places] = self._tried[places] * fading + steps
        kept = committed[::-1].cumsum()[::-1][1:]
        self._kept[places] = self._kept[places] * fading + kept[places]
        if seconds is None:
            return
        before = self._seconds.setdefault((rows, width), seconds)
        self._seconds[rows, width] += SMOOTHING * (seconds - before)
