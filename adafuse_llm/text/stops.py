"""The growing response: stop sequences, and what may already be shown."""

from __future__ import annotations

from collections.abc import Sequence


class Transcript:
    """Collects committed spans; nothing of a stop sequence ever leaves it.

    Args:
        stops: the response ends right before the first of these.
        drop_spaces: leading spaces (U+0020) to drop from the response at most, such as those
            that the prompt already ended in.

    Attributes:
        text: the response so far, cut at a stop sequence once one appeared.
        shown: how many of its characters have been released by `push` and `flush`.
        stopped: whether a stop sequence has appeared.
    """

    def __init__(self, stops: Sequence[str] = (), drop_spaces: int = 0) -> None:
        self.text = ""
        self.shown = 0
        self.stopped = False
        self._stops = tuple(stops)
        self._drop = drop_spaces

    def push(self, span: str) -> tuple[str, str]:
        """Add a span.

        Returns:
            The span less dropped spaces, and what may be shown now. The end of the response is
            held back while it could be the beginning of a stop sequence.
        """
        while self._drop and span.startswith(" ") and not self.text:
            span, self._drop = span[1:], self._drop - 1
        before = len(self.text)
        self.text += span
        cut = self._first_stop(before)
        if cut is not None:
            self.text, self.stopped = self.text[:cut], True
        visible = len(self.text) if self.stopped else len(self.text) - self._held()
        return span, self._release(visible)

    def flush(self) -> str:
        """Release what was held back; call it when nothing follows."""
        return self._release(len(self.text))

    def _release(self, end: int) -> str:
        shown, self.shown = self.text[self.shown : end], max(self.shown, end)
        return shown

    def _first_stop(self, before: int) -> int | None:
        """Where the earliest stop sequence begins that the text after `before` completed."""
        found = [
            at
            for stop in self._stops
            if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        return min(found, default=None)

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop sequence."""
        return max(
            (
                size
                for stop in self._stops
                for size in range(1, min(len(stop), len(self.text) + 1))
                if self.text.endswith(stop[:size])
            ),
            default=0,
        )
