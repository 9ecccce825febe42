"""Requests: what an application asks an engine for, and checks of its input."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from typing_extensions import Self

from adafuse_llm.config import AdaFuseConfig, DecodeOptions
from adafuse_llm.errors import (
    AdaFuseError,
    ContextWindowError,
    InvalidInputError,
    InvalidOptionError,
    short_repr,
)
from adafuse_llm.text.conversation import Conversation, Tool, check_conversation
from adafuse_llm.text.words import check_text

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

Messages = Sequence[Mapping[str, Any]] | Conversation
Tools = Sequence[Tool | Mapping[str, Any]]

KEYWORDS = ("messages", "tools", "tool_choice", "timeout", "cancel")
"""Keyword arguments of calls that become fields of `Request` instead of options."""


class GivenBatch(DecodeOptions, total=False):
    """Types of the keyword arguments of `Engine.generate_batch`, options of decoding included."""

    tools: Tools
    tool_choice: str
    timeout: float | None
    cancel: threading.Event | None


class Given(GivenBatch, total=False):
    """Types of the keyword arguments of calls with one prompt or one conversation."""

    messages: Messages | None


class Checked(NamedTuple):
    """A request with checked input: its conversation, if it has messages; its options on top of the
    engine's; and the maximum number of new tokens, which a lack of memory can lower.
    """

    request: Request
    conversation: Conversation | None
    config: AdaFuseConfig
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an application asks an engine for: to answer messages, to continue a prompt, or to score
    texts. `Engine.open` takes requests, and the other methods of `Engine` create them.

    Attributes:
        prompt: text to continue. Pass either a prompt or messages.
        messages: a conversation to answer, as dicts with a role and content. Each member renders it
            with its own chat template. An assistant's message may have ``tool_calls`` (dicts with
            ``id``, ``name`` and ``arguments``) and ``reasoning_content`` (text for chat templates
            that read it), and a tool's message the ``tool_call_id`` of the call that it answers.
        tools: tools that the reply can call: `Tool`, or dicts in the form of OpenAI's API. All
            members write calls in the same form (:mod:`adafuse_llm.text.conversation`).
        tool_choice: ``"auto"``; ``"none"`` to omit the tools; ``"required"`` to request a call of
            any tool; or the name of the tool to call. Members are asked for a call, not forced.
        texts: texts of at least one character to score as the response; None to decode a response.
        ends: whether the scores include the end of the response after each text.
        options: options of `AdaFuseConfig`, which replace those of the engine.
        timeout: maximum seconds from the start of the request (`Engine.open`), waiting included.
        cancel: an event that any thread can set to end the request after at most one more round.
            The response then has the text so far and ``finish_reason="cancelled"``. An exception of
            its ``is_set`` ends the request, too.
        name: name of the request in errors about its input. Default: its number in the batch.
        is_long: whether ``max_new_tokens`` has the default of responses with a form, such as JSON.
    """

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = ()
    tool_choice: str = "auto"
    texts: Sequence[str] | None = None
    ends: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    cancel: threading.Event | None = field(default=None, compare=False, repr=False)
    name: str = ""
    is_long: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any], **fields: Any) -> Self:
        """Create a request from keyword arguments as in `Given`, and from other `fields`."""
        options = {**given}
        named = {name: options.pop(name) for name in KEYWORDS if name in options}
        fields = {  # an iterator is read once, here
            name: tuple(value) if isinstance(value, Iterator) else value
            for name, value in {**named, **fields}.items()
        }
        return cls(options=options, **fields)

    def checked(self, config: AdaFuseConfig, *, to_encode: bool = False) -> Checked:
        """Check the request for an engine with the options `config`.

        With `to_encode`, the caller wants only the tokens of the prompt, which can be empty.

        Raises:
            InvalidInputError: the input cannot be used.
        """
        if self.texts is not None:
            _check_texts(self.texts)
        conversation = None
        if self.messages is not None:
            conversation = check_conversation(self.messages, self.tools, self.tool_choice)
        elif self.tools or self.tool_choice != "auto":
            raise InvalidInputError("tools and tool_choice need messages; got none")
        if self.cancel is not None and not callable(getattr(self.cancel, "is_set", None)):
            raise InvalidOptionError(
                f"cancel must be a threading.Event, or None; got {short_repr(self.cancel)}"
            )
        if self.timeout is not None and not (
            isinstance(self.timeout, (int, float)) and 0 < self.timeout <= threading.TIMEOUT_MAX
        ):
            raise InvalidOptionError(
                f"timeout must be a positive number of seconds, or None; got {self.timeout!r}"
            )
        config = config.override(self.options)
        if (self.prompt is None) == (conversation is None):
            raise InvalidInputError("pass either a prompt or messages")
        if conversation is None:
            _check_prompt(self.prompt, can_be_empty=to_encode or self.texts is not None)
        elif config.continue_final_message:
            conversation = conversation.continued()
        has_form = conversation is not None and (conversation.tools or conversation.instructions)
        most = config.most_tokens(has_form=self.is_long or bool(has_form))
        return Checked(self, conversation, config, most)


def converted(requests: Sequence[Request], convert: Callable[[Request], T]) -> list[T]:
    """Convert each request with `convert`. Errors about its input name the request (`numbered`)."""
    results = []
    for number, request in enumerate(requests):
        try:
            results.append(convert(request))
        except AdaFuseError as error:
            raise numbered(error, request, number, len(requests)) from None
    return results


def numbered(error: E, request: Request, number: int, size: int) -> E:
    """Add a request's name, or its number in the batch, to an error about the request's input.

    Other errors, such as those about options, stay as they are. The batch has `size` requests.
    """
    is_option = isinstance(error, InvalidOptionError)
    name = request.name or (f"input {number} of the batch" if size > 1 else "")
    if not name or is_option or not isinstance(error, (InvalidInputError, ContextWindowError)):
        return error
    return type(error)(f"{name}: {error}")


def requests_of(prompts: Any, messages: Any, given: Mapping[str, Any]) -> list[Request]:
    """Return the requests for a list of prompts, or for a list of conversations."""
    name, inputs = ("prompt", prompts) if messages is None else ("messages", messages)
    is_list = isinstance(inputs, Iterable) and not isinstance(inputs, (str, bytes, Mapping))
    batch = list(inputs) if is_list else []
    if messages is None:
        fits = all(isinstance(value, str) for value in batch)
    else:  # a list of messages is one conversation
        fits = prompts is None and not any(isinstance(value, Mapping) for value in batch)
    if not is_list or not fits:
        raise InvalidInputError(
            "pass a list of prompts, which are texts, or messages=[conversation, ...], where each "
            f"conversation is a list of messages; got {short_repr(inputs)}"
        )
    return [Request.of(given, **{name: value}) for value in batch]


def _check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str) or not texts:
        raise InvalidInputError("continuations must be a list of at least one text")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidInputError(
                f"a continuation must be non-empty text; got {short_repr(text)}"
            )
        check_text(text, "a continuation")


def _check_prompt(prompt: str | None, *, can_be_empty: bool) -> None:
    if not isinstance(prompt, str):
        raise InvalidInputError(f"prompt must be text; got {type(prompt).__name__}")
    check_text(prompt, "the prompt")
    if not prompt.strip(" ") and not can_be_empty:
        raise InvalidInputError("the prompt is empty, or has only spaces: pass a text to continue")
