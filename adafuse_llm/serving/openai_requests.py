"""Read requests in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from adafuse_llm.adapters.conversation import Turn, malformed_calls, to_conversation
from adafuse_llm.adapters.reply_form import ReplyForm, schema_of, to_tool_choice
from adafuse_llm.config import CONSTRAINTS, GRAMMARS
from adafuse_llm.errors import InvalidInputError, short_repr
from adafuse_llm.serving.errors import CONTEXT_CODE, ApiError, api_error, invalid, option_of
from adafuse_llm.serving.openai_fields import LENGTHS, NO_LIMIT, NO_TOOLS, Body, Ignored, parse
from adafuse_llm.text.conversation import Conversation, check_tools

THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
"""Types of content parts that are reasoning of earlier replies, which members do not read there."""


class Part(BaseModel):
    """A part of a body. Keys that it does not have are ignored."""

    model_config = ConfigDict(strict=True)


class Message(Part):
    """A message, with the fields of `Turn`. Clients send many others, which no member reads."""

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    reasoning: str | None = Field(default=None, alias="reasoning_content")


class StreamOptions(Part):
    """What a stream has beside the text."""

    include_usage: bool | None = None


class Common(Body):
    """The fields that all requests for responses can have.

    Attributes:
        PROMPT: name of the field with the prompt or the conversation.
        FORM: name of the field with the form of replies without calls.
        LENGTH: the API's own name of ``max_new_tokens``.
    """

    PROMPT: ClassVar[str] = "messages"
    FORM: ClassVar[str] = "response_format"
    LENGTH: ClassVar[str] = "max_tokens"

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class Conversational(Common):
    """The fields of requests with a conversation."""

    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class _ChatBody(Conversational):
    messages: list[Message]
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class _CompletionBody(Common):
    PROMPT: ClassVar[str] = "prompt"

    prompt: str | list[str]
    logprobs: int | None = None


@dataclass
class ServedRequest:
    """A request to a model.

    Attributes:
        body: the fields of the request.
        ignored: the parts of the request that were ignored, and other warnings for the client.
        options: options of `AdaFuseConfig`.
        given: the client's names of the options.
        enforce: whether the form is enforced: True, False, or ``"auto"`` to describe a form that
            cannot be enforced to the members only.
        open_ended: whether the response may fill the context window.
        prompts: the prompts of a completion.
        conversation: the conversation of a chat.
        form: the form of the reply.
        variables: variables for the chat templates that read them.
        effort: how much the members reason; None for their own default.
        echoed: the fields that a response of the Responses API repeats; None for the other APIs.
    """

    body: Common
    ignored: Ignored
    options: dict[str, Any] = field(init=False)
    given: dict[str, str] = field(init=False)
    enforce: bool | Literal["auto"] = field(init=False)
    open_ended: bool = field(init=False)
    prompts: Sequence[str] = ()
    conversation: Conversation | None = None
    form: ReplyForm = field(default_factory=ReplyForm)
    variables: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    echoed: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self.options, self.given = self.body.options(self.ignored)
        self.enforce = self.body.adafuse.enforce
        lengths = [(self.body.model_extra or {}).get(name) for name in LENGTHS]
        self.open_ended = NO_LIMIT in lengths and "max_new_tokens" not in self.options

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar may have to be compiled, which takes time."""
        return not self.form.is_free or any(self.options.get(name) is not None for name in GRAMMARS)

    @property
    def length_field(self) -> str:
        """The client's name for ``max_new_tokens``."""
        return self.given.get("max_new_tokens", self.body.LENGTH)

    def error(self, error: BaseException) -> ApiError:
        """Return an error of the engine, with the name of the field in the request."""
        described = api_error(error)
        is_limit = described.status == 504 or described.code == CONTEXT_CODE
        if is_limit and not self.body.adafuse.rounds:  # else the client is a RemoteEngine
            described.message = described.message.replace("timeout=", "").replace(
                "max_new_tokens", self.length_field
            )
        option = described.param or ""
        if (name := self.given.get(option)) is not None:
            described.param = name
            described.message = described.message.replace(f"option {option!r}", f"field {name!r}")
        if described.param is None and described.code == CONTEXT_CODE:
            described.param = self.body.PROMPT
        return described


def read_chat(body: dict[str, Any], ignored: Ignored) -> ServedRequest:
    """Read a request for a chat completion.

    Args:
        body: the body of the request.
        ignored: takes what is ignored.

    Raises:
        ApiError: a field is not supported, or has an invalid value.
    """
    chat = parse(_ChatBody, body, ignored)
    asked = ServedRequest(chat, ignored, effort=chat.reasoning_effort)
    converse(asked, chat, to_turns(chat.messages, ignored), chat.response_format)
    return asked


def read_completion(body: dict[str, Any], ignored: Ignored) -> ServedRequest:
    """Read a request for a completion. The arguments and errors are those of `read_chat`."""
    prompts = body.get("prompt")
    if isinstance(prompts, list) and any(not isinstance(each, str) for each in prompts):
        raise invalid(
            "prompt must be a text or a list of texts; token ids are not supported, because every "
            "member has its own tokens",
            "prompt",
        )
    completion = parse(_CompletionBody, body, ignored)
    prompts = [completion.prompt] if isinstance(completion.prompt, str) else completion.prompt
    if not prompts:
        raise invalid("prompt must be a text, or a list of at least one text", "prompt")
    asked = ServedRequest(completion, ignored, prompts=prompts)
    if completion.logprobs is not None:
        asked.options |= {"logprobs": True, "top_logprobs": completion.logprobs}
        asked.given["top_logprobs"] = "logprobs"
    return asked


def converse(
    asked: ServedRequest,
    body: Conversational,
    turns: Sequence[Turn],
    response_format: Mapping[str, Any] | None,
) -> None:
    """Add a conversation and the form of its reply to a request.

    Raises:
        ApiError: a field has an invalid value, or two fields contradict each other.
    """
    functions = functions_of(body.tools, asked.ignored)
    with naming("tools"):
        tools = check_tools(functions)
    with naming("tool_choice"):
        choice = to_tool_choice(body.tool_choice, [tool.name for tool in tools])
    with naming(body.FORM):
        schema = schema_of(response_format)
    asked.form = form = ReplyForm(tools, choice, body.parallel_tool_calls, schema)
    constraint = next((name for name in CONSTRAINTS if name in asked.options), None)
    has_form = asked.enforce is not False and (form.calls_tools or schema is not None)
    if constraint is not None and has_form:
        name = asked.given[constraint]
        raise invalid(
            f"{name} cannot be combined with {'tools' if form.calls_tools else body.FORM}, "
            "because both determine the form of the reply; send only one of them",
            name,
        )
    described = (response_format or {}).get("json_schema") or response_format or {}
    is_strict = any(each.get("strict") is True for each in (*functions, described))
    if is_strict and asked.enforce == "auto":
        asked.enforce = True
    asked.variables = body.chat_template_kwargs
    with naming(body.PROMPT):
        asked.conversation = to_conversation(
            turns,
            tools=tools,
            tool_choice=choice,
            instructions="\n\n".join(filter(None, (form.instructions, body.adafuse.instructions))),
        )
    if any(map(malformed_calls, turns)):
        asked.ignored.warnings.append(
            f"{body.PROMPT} has tool calls whose arguments are not a JSON object. Members read "
            "them as text."
        )


def functions_of(tools: Sequence[Mapping[str, Any]], ignored: Ignored) -> list[Mapping[str, Any]]:
    """Return the functions of tools. Tools of other types are ignored.

    Raises:
        ApiError: a function has its schema under another name.
    """
    functions = []
    for number, tool in enumerate(tools):
        place, kind = f"tools.{number}", tool.get("type", "function")
        if kind != "function":
            ignored.add(place, f"it has the type {short_repr(kind)}, and {NO_TOOLS}")
            continue
        function = tool.get("function")
        function = function if isinstance(function, Mapping) else tool
        if function.get("parameters") is None and any(
            isinstance(each, Mapping) for each in function.values()
        ):
            raise invalid(f"{place}: put the JSON schema of its input into 'parameters'", "tools")
        functions.append(function)
    return functions


def to_turns(messages: Sequence[Message], ignored: Ignored) -> list[Turn]:
    """Return messages of OpenAI's API as turns."""
    turns: list[Turn] = []
    for number, each in enumerate(messages):
        place = f"messages.{number}.content" if each.role == "tool" else None
        turn: Any = {**dict(each), "content": readable(each.content, place, ignored)}
        turns.append(turn)
    return turns


def readable(content: Any, result: str | None, ignored: Ignored) -> Any:
    """Return the content of a message, as members can read it.

    Thoughts are left out, and refusals become text. Agents send the result of a tool again with
    every later turn, so it must not end their conversation: a note replaces what is not text. In
    other messages, such as those with an image, it stays and is refused later.

    Args:
        content: the content.
        result: name of the field, if it is the result of a tool.
        ignored: takes what a note replaces.
    """
    if (
        content is None
        or isinstance(content, str)
        or (result is None and type(content) is not list)
    ):
        return content
    parts: list[Any] = []
    for part in content if isinstance(content, list) else [content]:
        given = part if isinstance(part, Mapping) else {"text": part}
        kind = given.get("type")
        if result is not None:
            is_text = isinstance(given.get("text"), str)
            parts.append(part if is_text else note_of(kind, result, ignored))
        elif kind == "refusal":
            parts.append({"type": "text", "text": given.get("refusal")})
        elif kind not in THOUGHTS:
            parts.append(part)
    return parts


def note_of(kind: object, place: str, ignored: Ignored) -> str:
    """Return a text for something that members cannot read."""
    name = kind[:100] if isinstance(kind, str) else "data"
    ignored.add(place, f"the members read {short_repr(name)} as a short text")
    return f"[{name}, not shown]"


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Name the field in errors about invalid input."""
    try:
        yield
    except InvalidInputError as error:
        raise invalid(str(error), option_of(error) or name) from error
