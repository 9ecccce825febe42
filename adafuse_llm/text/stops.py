"""The response during decoding: stop sequences, and the text that can already be shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence


class Transcript:
    """The committed spans of a response, cut before the first stop sequence.

    Args:
        stops: the stop sequences.
        can_end: function that returns whether a text is a complete response. A stop sequence has no
            effect if the text before it is not. Default: every text is complete.

    Attributes:
        text: the response so far, up to the first stop sequence.
        shown: number of its characters that `push` and `flush` have released.
        stopped: whether a stop sequence has appeared.
    """

    def __init__(
        self, stops: Sequence[str] = (), can_end: Callable[[str], bool] | None = None
    ) -> None:
        self.text = ""
        self.shown = 0
        self.stopped = False
        self._stops = tuple(stops)
        self._can_end = can_end

    def push(self, span: str) -> str:
        """Add a span, and return the text that can be shown now.

        The end of the response is held back while it could be the beginning of a stop sequence.
        """
        before = len(self.text)
        self.text += span
        cut = self._first_stop(before)
        if cut is not None:
            self.text, self.stopped = self.text[:cut], True
        visible = len(self.text) if self.stopped else len(self.text) - self._held_back()
        return self._release(visible)

    def flush(self) -> str:
        """Release the text that was held back. The response has ended."""
        return self._release(len(self.text))

    def _release(self, end: int) -> str:
        shown, self.shown = self.text[self.shown : end], max(self.shown, end)
        return shown

    def _first_stop(self, before: int) -> int | None:
        """Return the start of the earliest stop sequence that ends after index `before`."""
        starts = sorted(
            start
            for stop in self._stops
            for start in self._occurrences(stop, max(0, before - len(stop) + 1))
        )
        if self._can_end is None:
            return min(starts, default=None)
        return next((start for start in starts if self._can_end(self.text[:start])), None)

    def _occurrences(self, stop: str, start: int) -> Iterator[int]:
        while (start := self.text.find(stop, start)) >= 0:
            yield start
            start += 1

    def _held_back(self) -> int:
        """Return the length of the longest end of the text that could begin a stop sequence."""
        return max(
            (
                size
                for stop in self._stops
                for size in range(1, min(len(stop), len(self.text) + 1))
                if self.text.endswith(stop[:size])
            ),
            default=0,
        )
