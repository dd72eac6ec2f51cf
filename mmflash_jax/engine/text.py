"""The text of an answer while its tokens arrive.

What is shown is never taken back: a token that ends inside a character waits for the rest of it,
and text that may become a stop string waits until it cannot.
"""

from collections.abc import Callable, Sequence

from mmflash_jax.engine.stops import cut_at_stop

BROKEN = "\N{REPLACEMENT CHARACTER}"


class TokenText:
    """Text of tokens in order, as far as it can no longer change.

    Only the last tokens are decoded again, so a long answer costs as much a token as a short one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._window: list[int] = []
        self._shown = self._whole = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that more tokens settle."""
        self._window += ids
        text = self._decode(self._window)
        # Bytes of an unfinished character decode to replacement characters at the end.
        settled = text.rstrip(BROKEN)
        new = settled[self._shown :]
        self._shown = max(self._shown, len(settled))
        if settled == text and new:
            # Tokens up to the last whole character but one push are done with. The others stay as
            # context: a first token may decode differently.
            self._window = self._window[self._whole :]
            self._whole = len(self._window)
            self._shown = len(self._decode(self._window))
        return new

    def rest(self) -> str:
        """What the last tokens leave, broken characters included."""
        text = self._decode(self._window)[self._shown :]
        self._shown += len(text)
        return text


class AnswerText:
    """One answer: its tokens, its text, and where a stop string or stop id ends it.

    ids: tokens that count, those that complete a stop included. ended: nothing more will come.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stops: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
    ):
        self.ids: list[int] = []
        self.text = ""
        self.ended = False
        self._decode = decode
        self._stops = tuple(stops)
        self._stop_ids = frozenset(stop_ids)
        self._settling = TokenText(decode)
        self._held = ""

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Text that can be shown now; `last` tokens leave nothing held back.

        Sets `ended` if these tokens complete a stop string or hold a stop id.
        """
        taken = self._until_stop_id(ids)
        self.ids += taken
        self._held += self._settling.push(taken)
        if last or self.ended:
            self._held += self._settling.rest()
        if any(stop in self._held for stop in self._stops):
            text, count, _ = cut_at_stop(self._decode, self.ids, self._stops)
            del self.ids[count:]
            self.ended = True
            return self._show(text[len(self.text) :])
        if last or self.ended:
            return self._show(self._held)
        return self._show(self._held[: len(self._held) - self._may_become_stop()])

    @property
    def held(self) -> int:
        """Characters that are known and not shown yet."""
        return len(self._held)

    def _until_stop_id(self, ids: Sequence[int]) -> list[int]:
        for place, id in enumerate(ids):
            if id in self._stop_ids:
                self.ended = True
                return list(ids[: place + 1])
        return list(ids)

    def _may_become_stop(self) -> int:
        """Characters at the end that begin a stop string."""
        most = 0
        for stop in self._stops:
            for count in range(min(len(stop) - 1, len(self._held)), most, -1):
                if self._held.endswith(stop[:count]):
                    most = count
                    break
        return most

    def _show(self, text: str) -> str:
        self.text += text
        self._held = self._held[len(text) :]
        return text
