"""The JSON that `RemoteEngine` and the server exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import Self

from adafuse_llm import errors
from adafuse_llm.errors import AdaFuseError, InvalidInputError, MemberError
from adafuse_llm.results import Generation, MemberInfo, Round, Scores, StreamEvent
from adafuse_llm.text.conversation import Conversation, check_conversation

PROTOCOL: Final = 2
"""Version of these forms. The server and its clients need the same one."""

ROOT = "/adafuse/v1"
INFO = f"{ROOT}/info"
OPEN = f"{ROOT}/open"
CANCEL = f"{ROOT}/cancel"
CHECK = f"{ROOT}/check"
TOKENS = f"{ROOT}/tokens"

KINDS: dict[str, type[AdaFuseError]] = {name: getattr(errors, name) for name in errors.__all__}
"""The errors that a client raises as the server did, by name."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Input(_Message):
    """A prompt, or a conversation. Use `of` to create one.

    Attributes:
        prompt: the prompt.
        messages: the checked messages of a conversation.
        tools: name, description and parameters of each tool of the conversation.
        tool_choice: as in `Conversation`.
        instructions: as in `Conversation`.
        continues: as in `Conversation`.
    """

    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    instructions: str = ""
    continues: bool = False

    @classmethod
    def of(cls, prompt: str | None, conversation: Conversation | None, **fields: Any) -> Self:
        """Return the form of a prompt or of a conversation. `fields` are those of a subclass."""
        if conversation is None:
            return cls(prompt=prompt, **fields)
        return cls(
            **fields,
            messages=tuple(map(dict, conversation.messages)),
            tools=tuple(map(dict, map(vars, conversation.tools))),
            tool_choice=conversation.tool_choice,
            instructions=conversation.instructions,
            continues=conversation.continues,
        )

    def conversation(self) -> Conversation | None:
        """Return the checked conversation, or None.

        Raises:
            InvalidInputError: the conversation has an invalid form.
        """
        if (self.prompt is None) == (self.messages is None):
            raise InvalidInputError("an input has either a prompt or messages")
        if self.messages is None:
            return None
        conversation = check_conversation(
            self.messages, self.tools, self.tool_choice, instructions=self.instructions
        )
        return replace(conversation, continues=True) if self.continues else conversation


class OneRequest(Input):
    """The form of a `Request`.

    Attributes:
        texts: as in `Request`.
        stops: as in `Request`.
        options: as in `Request`.
        timeout: as in `Request`.
        is_cancelled: whether the caller has cancelled the request already.
    """

    texts: tuple[str, ...] | None = None
    stops: bool = False
    options: dict[str, Any] = Field(default_factory=dict)
    timeout: float | None = Field(default=None, gt=0)
    is_cancelled: bool = False


class OpenRequest(_Message):
    """A request to open requests. The answer is a stream: `Head`, and then a `Line` per event.

    Attributes:
        requests: the requests.
        strategy: name of the strategy; None for the server's.
    """

    requests: tuple[OneRequest, ...]
    strategy: str | None = None


class _Request(_Message):
    """What all requests have.

    Attributes:
        strategy: name of the strategy; None for the server's.
        options: options of `AdaFuseConfig`.
    """

    strategy: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class CheckRequest(_Request):
    """A request to check whether options can be enforced."""


class TokensRequest(_Request):
    """A request for the tokens of a whole prompt (`input`) or of a text inside a prompt."""

    input: Input | None = None
    text: str | None = None


class CancelRequest(_Message):
    """A request to end some requests of a stream. Their responses have the text so far.

    Attributes:
        stream: id of the stream.
        requests: numbers of the requests.
    """

    stream: str
    requests: tuple[int, ...]


class Cancelled(_Message):
    """The answer to `CancelRequest`.

    Attributes:
        found: whether the server has found the stream. Behind a load balancer, another server may
            have it.
    """

    found: bool = True


class Tokens(_Message):
    """Tokens by member."""

    tokens: dict[str, list[int]]


class Done(_Message):
    """The answer to a request without a result."""


class Info(_Message):
    """What a client needs to know about the server's engine."""

    protocol: Literal[2]
    members: tuple[MemberInfo, ...]
    strategy: str
    config: dict[str, Any]
    can_enforce: bool


class Head(_Message):
    """The first line of a stream: all inputs are checked and encoded.

    Attributes:
        stream: id of the stream, for `CancelRequest`.
        size: number of the responses.
        members: names of the server's members.
    """

    stream: str
    size: int
    members: tuple[str, ...]


class Failure(_Message):
    """An error.

    Attributes:
        kind: name of its class in `adafuse_llm.errors`; empty for an error of the server.
        message: its message.
        member: the member that failed, if one did.
        reason: why it failed.
    """

    kind: str = ""
    message: str = ""
    member: str | None = None
    reason: str = ""

    @classmethod
    def of(cls, error: AdaFuseError, clean: Callable[[str], str]) -> Failure:
        """Return the form of an error.

        Args:
            error: the error.
            clean: removes from its texts what clients should not see.
        """
        kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in KINDS)
        if isinstance(error, MemberError):
            return cls(kind=kind, member=error.member, reason=clean(error.reason))
        return cls(kind=kind, message=clean(str(error)))

    def error(self) -> AdaFuseError | None:
        """Return the error; None if it has no class here."""
        kind = KINDS.get(self.kind)
        if kind is None:
            return None
        if issubclass(kind, MemberError):
            return kind(self.member or "", self.reason)
        return kind(self.message)


class Line(_Message):
    """Every further line of a stream: an event of a response, or the error that ended the stream.

    Attributes:
        index: number of the response.
        event: its next event.
        scores: the scores, if texts are scored.
        failure: the error.
    """

    index: int = 0
    event: StreamEvent | None = None
    scores: Scores | None = None
    failure: Failure | None = None


class Events:
    """Packs or unpacks the events of a stream.

    The generation in the last event of a response travels without the rounds of earlier events.
    """

    def __init__(self) -> None:
        self._rounds: dict[int, tuple[Round, ...]] = {}

    def pack(self, index: int, event: StreamEvent | Scores) -> Line:
        """Return the line for an event."""
        if isinstance(event, Scores):
            return Line(index=index, scores=event)
        return Line(index=index, event=self._with_rounds(index, event, _without))

    def unpack(self, line: Line) -> StreamEvent | Scores | None:
        """Return the event of a line; None if it has none."""
        if line.event is None:
            return line.scores
        return self._with_rounds(line.index, line.event, _with)

    def _with_rounds(
        self,
        index: int,
        event: StreamEvent,
        change: Callable[[Generation, tuple[Round, ...]], tuple[Round, ...]],
    ) -> StreamEvent:
        rounds = self._rounds.get(index, ())
        if event.round is not None:
            rounds = self._rounds[index] = (*rounds, event.round)
        if event.generation is None:
            return event
        changed = {"rounds": change(event.generation, rounds)}
        generation = event.generation.model_copy(update=changed)
        return event.model_copy(update={"generation": generation})


def _without(generation: Generation, sent: tuple[Round, ...]) -> tuple[Round, ...]:
    return generation.rounds[len(sent) :]


def _with(generation: Generation, received: tuple[Round, ...]) -> tuple[Round, ...]:
    return (*received, *generation.rounds)
