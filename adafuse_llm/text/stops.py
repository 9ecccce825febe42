"""The response during decoding: stop sequences, and the text that can already be shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from adafuse_llm.text.conversation import CALL_CLOSES, CALL_OPENS
from adafuse_llm.text.reasoning import split_reasoning

TURNS = ("\nUser:", "\nAssistant:")
"""Beginnings of the next turn in the plain format of conversations (`Conversation.plain_text`). A
member without a chat template may go on with such a turn instead of ending its reply."""

_CALL = re.compile(rf"{CALL_OPENS}[\s\S]*?{CALL_CLOSES}")
_BARE_CALL = re.compile(r'^\{.*"arguments".*\}$', re.MULTILINE)  # in a reply that begins with JSON


@dataclass
class Transcript:
    """The committed spans of a response, cut before the first stop sequence.

    Attributes:
        stops: the stop sequences.
        can_end: returns whether a text is a complete response. A stop sequence counts only after
            such a text. Default: every text is complete.
        turns: beginnings of a next turn. The response ends before the first one.
        calls: whether the response may call tools. If so, it ends after a call that it repeats,
            because small models repeat one call without end.
        prefix: text with which the chat templates began the response.
        text: the response so far, up to what has ended it.
        shown: number of characters of `text` that `push` and `flush` have returned.
        stopped: ``"stop_sequence"`` after a stop sequence, ``"stop"`` after a turn or a repeated
            call, and None before.
    """

    stops: Sequence[str] = ()
    can_end: Callable[[str], bool] | None = None
    turns: Sequence[str] = ()
    calls: bool = False
    prefix: str = ""
    text: str = ""
    shown: int = 0
    stopped: Literal["stop", "stop_sequence"] | None = None

    def push(self, span: str) -> str:
        """Add a span, and return the text that can be shown now.

        It holds back an end of the response that could still become a stop sequence or turn.
        """
        before = len(self.text)
        self.text += span
        # the first stop sequence or next turn ends the response
        cut = self._first(self.stops, before, self.can_end)
        turn = self._first(self.turns, before)
        if turn is not None and (cut is None or turn < cut):
            self.text, self.stopped = self.text[:turn].rstrip(), "stop"
        elif cut is not None:
            self.text, self.stopped = self.text[:cut], "stop_sequence"
        elif self.calls and ("}" in span or ">" in span):  # a call may end here
            answer = split_reasoning(self.text, self.prefix)[1]
            pattern = _BARE_CALL if answer.lstrip()[:1] in ("{", "[", "`") else _CALL
            calls = [*pattern.finditer(answer)]
            if len({match[0] for match in calls}) < len(calls):
                end = len(self.text) - len(answer) + calls[-1].end()
                self.text, self.stopped = self.text[:end], "stop"
        # hold back what can still become a stop sequence or a turn
        visible = len(self.text)
        if not self.stopped:
            visible -= begun_size(self.text, self.stops)
            if self.turns:
                turn = begun_size(self.text, self.turns)
                visible = min(visible, len(self.text[: len(self.text) - turn].rstrip()))
        start, self.shown = self.shown, max(self.shown, visible)
        return self.text[start:visible]

    def flush(self) -> str:
        """Return the text that was held back. Call this once the response has ended."""
        start, self.shown = self.shown, len(self.text)
        return self.text[start:]

    def _first(
        self, texts: Sequence[str], before: int, can_end: Callable[[str], bool] | None = None
    ) -> int | None:
        # return where the first text begins that the last span completes, or None if there is none
        starts = []
        for text in texts:
            start = max(0, before - len(text) + 1) - 1
            while (start := self.text.find(text, start + 1)) >= 0:
                starts.append(start)
        if can_end is None:
            return min(starts, default=None)
        # a stop sequence counts only if the response before it is complete
        return next((start for start in sorted(starts) if can_end(self.text[:start])), None)


def begun_size(text: str, beginnings: Sequence[str]) -> int:
    """Return the length of the longest proper prefix of one of `beginnings` that ends `text`."""
    sizes = (
        size
        for each in beginnings
        for size in range(1, min(len(each), len(text) + 1))
        if text.endswith(each[:size])
    )
    return max(sizes, default=0)
