"""The errors of this package that adafuse-llm does not have."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import AIMessage

from adafuse_llm import RequestTimeoutError


class CallTimeoutError(RequestTimeoutError):
    """A call took longer than the model's ``timeout``. The error has the response so far.

    For example::

        try:
            message = chat.invoke(question, timeout=5)
        except CallTimeoutError as error:
            message = error.partial

    Attributes:
        partial: the response so far. A chat model's response is an `AIMessage` with the
            ``finish_reason`` ``"cancelled"``; a text model's response is text.
        partials: all responses of a call with several prompts, or with `n` above 1, in order. Some
            of them may be complete.
    """

    def __init__(self, message: str, partials: Sequence[AIMessage | str]) -> None:
        super().__init__(message)
        self.partials = tuple(partials)
        self.partial = self.partials[0]

    def __reduce__(self) -> tuple[type[CallTimeoutError], tuple[str, tuple[AIMessage | str, ...]]]:
        return type(self), (str(self), self.partials)
