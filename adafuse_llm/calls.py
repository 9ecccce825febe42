"""The arguments of calls: their types, their checks, and how their requests start and stop."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from adafuse_llm.config import AdaFuseConfig
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, short_repr
from adafuse_llm.results import Round, Scores, StreamEvent
from adafuse_llm.text.chat import Tool
from adafuse_llm.text.conversation import Conversation, check_conversation
from adafuse_llm.text.words import check_text

T = TypeVar("T")
E = TypeVar("E", bound=StreamEvent | Scores)

RoundObserver = Callable[[Round], None]
Messages = Sequence[Mapping[str, Any]] | Conversation
Tools = Sequence[Tool | Mapping[str, Any]]


class CallInput(NamedTuple):
    """One input of a call.

    Attributes:
        prompt: the prompt, or None.
        messages: the messages, or None.
        continuations: the texts to score. A call that decodes has none.
    """

    prompt: str | None
    messages: Messages | None
    continuations: Sequence[str] = ()


@dataclass(frozen=True)
class Call:
    """The arguments of a call that decodes or scores.

    Attributes:
        inputs: the inputs.
        tools: as for `Engine.generate`.
        tool_choice: as for `Engine.generate`.
        cancel: as for `Engine.generate`.
        timeout: as for `Engine.generate`.
        overrides: options.
        is_batch: whether errors name the input by its index.
        stops: as for `Engine.score`.
    """

    inputs: Sequence[CallInput]
    tools: Tools = ()
    tool_choice: str = "auto"
    cancel: threading.Event | None = None
    timeout: float | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    is_batch: bool = False
    stops: bool = False

    def each_input(self, convert: Callable[[CallInput], T]) -> list[T]:
        """Return each input converted by `convert`.

        Raises:
            InvalidInputError: `convert` raised it. For a batch, the error names the input.
        """
        converted = []
        for number, each in enumerate(self.inputs):
            try:
                converted.append(convert(each))
            except InvalidOptionError:
                raise
            except InvalidInputError as error:
                if not self.is_batch:
                    raise
                raise type(error)(f"input {number} of the batch: {error}") from error
        return converted


class Decode(ABC, Generic[E]):
    """The requests of a call whose inputs are checked and encoded: responses, or scores.

    Attributes:
        size: number of the requests.
    """

    size: int

    @abstractmethod
    def start(self, deliver: Callable[[int, E | BaseException], None]) -> None:
        """Start all requests at the same time.

        Args:
            deliver: called in another thread with the number of a request and its next event, or
                the error that ended it. It must not block.

        Raises:
            QueueFullError: too many requests wait; nothing was computed.
            EngineClosedError: the engine is closed.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop the requests that are not finished. Any thread can call this, several times."""


@contextmanager
def running(decode: Decode[E], deliver: Callable[[int, E | BaseException], None]) -> Iterator[None]:
    """Start the requests of a call, and on exit stop those that are not finished."""
    try:
        decode.start(deliver)
        yield
    finally:
        decode.stop()


def check_waiting(cancel: threading.Event | None, timeout: float | None) -> None:
    """Check how long a caller waits.

    Raises:
        InvalidOptionError: `timeout` is not a positive number, or `cancel` is not an event.
    """
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise InvalidOptionError(
            f"cancel must be a threading.Event, or None; got {short_repr(cancel)}"
        )
    if timeout is not None and not (
        isinstance(timeout, (int, float)) and 0 < timeout <= threading.TIMEOUT_MAX
    ):
        raise InvalidOptionError(
            f"timeout must be a positive number of seconds, or None; got {timeout!r}"
        )


def check_continuations(continuations: Sequence[str]) -> None:
    """Check the texts to score.

    Raises:
        InvalidInputError: there are none, or one is not a text.
    """
    if isinstance(continuations, str) or not continuations:
        raise InvalidInputError("continuations must be a list of at least one text")
    for text in continuations:
        if not isinstance(text, str) or not text:
            raise InvalidInputError(
                f"a continuation must be non-empty text; got {short_repr(text)}"
            )
        check_text(text, "a continuation")


def with_tools(messages: Messages | None, tools: Tools, tool_choice: str) -> Messages | None:
    """Return messages with the tools that the reply can call.

    Raises:
        InvalidInputError: the messages or the tools are invalid, or tools come without messages.
    """
    if messages is not None:
        return check_conversation(messages, tools, tool_choice)
    if tools or tool_choice != "auto":
        raise InvalidInputError("tools and tool_choice need messages; got none")
    return None


def check_input(
    config: AdaFuseConfig, prompt: str | None, messages: Messages | None, *, to_score: bool
) -> Conversation | None:
    """Check a prompt, or return the checked conversation."""
    if (prompt is None) == (messages is None):
        raise InvalidInputError("pass either a prompt or messages")
    if messages is not None:
        conversation = check_conversation(messages)
        return conversation.continued() if config.continue_final_message else conversation
    if not isinstance(prompt, str):
        raise InvalidInputError(f"prompt must be text; got {type(prompt).__name__}")
    check_text(prompt, "the prompt")
    if not prompt.strip(" ") and not to_score:
        raise InvalidInputError("the prompt is empty, or has only spaces: pass a text to continue")
    return None


def check_input_text(text: str) -> None:
    """Check a text whose tokens are counted.

    Raises:
        InvalidInputError: it is not a valid text.
    """
    if not isinstance(text, str):
        raise InvalidInputError(f"text must be text; got {type(text).__name__}")
    check_text(text, "the text")


def split_batch(prompts: Any, messages: Any, continuations: Any = None) -> list[CallInput]:
    """Return the inputs of a batch.

    Args:
        prompts: a list of prompts, or None.
        messages: a list of conversations, or None.
        continuations: a list with the texts to score for each of them; None to score nothing.

    Raises:
        InvalidInputError: neither argument is a list of the right things, or both are given.
    """
    given = prompts if messages is None else messages
    if (
        (prompts is None) == (messages is None)
        or isinstance(given, (str, bytes, Mapping))
        or not isinstance(given, Iterable)
    ):
        raise InvalidInputError("pass a list of prompts, or a list of conversations")
    batch = list(given)
    for each in batch:
        if messages is None and not isinstance(each, str):
            raise InvalidInputError(
                f"each prompt must be text; got {short_repr(each)}. Pass conversations as "
                "messages=[conversation, ...]."
            )
        if messages is not None and isinstance(each, Mapping):
            raise InvalidInputError(
                "messages must be a list of conversations, and each conversation a list of "
                "messages; got one conversation. Pass messages=[conversation]."
            )
    if continuations is None:
        texts: Sequence[Sequence[str]] = [()] * len(batch)
    elif isinstance(continuations, str) or len(texts := list(continuations)) != len(batch):
        raise InvalidInputError(
            f"continuations must have a list of texts for each of the {len(batch)} inputs; got "
            f"{short_repr(continuations)}"
        )
    inputs = zip(batch, texts, strict=True)
    if messages is None:
        return [CallInput(each, None, given) for each, given in inputs]
    return [CallInput(None, each, given) for each, given in inputs]
