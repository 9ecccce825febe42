"""Read requests in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from adafuse_llm.adapters.conversation import Turn, malformed_calls, to_conversation
from adafuse_llm.adapters.reply_form import ReplyForm, schema_of, to_tool_choice
from adafuse_llm.config import CONSTRAINTS, GRAMMARS
from adafuse_llm.errors import InvalidInputError, short_repr
from adafuse_llm.serving.errors import CONTEXT_CODE, LATE, ApiError, api_error, invalid, option_of
from adafuse_llm.serving.openai_fields import LENGTHS, NO_LIMIT, NO_TOOLS, Body, Ignored, parse
from adafuse_llm.text.conversation import Conversation, Tool, check_tools

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
    """The fields that all requests for responses can have."""

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
    prompt: str | list[str]
    logprobs: int | None = None
    echo: bool = False


@dataclass(frozen=True)
class ServedRequest:
    """A request to a model.

    Attributes:
        body: the fields of the request.
        options: options of `AdaFuseConfig`.
        ignored: the parts of the request that were ignored, and other warnings for the client.
        given: the client's names of the options.
        prompts: the prompts of a completion.
        echo: whether each completion begins with its prompt.
        conversation: the conversation of a chat.
        form: the form of the reply.
        enforce: whether the form is enforced: True, False, or ``"auto"`` to describe a form that
            cannot be enforced to the members only.
        variables: variables for the chat templates that read them.
        effort: how much the members reason; None for their own default.
        open_ended: whether the response may fill the context window.
        echoed: the fields that a response of the Responses API repeats; None for the other APIs.
    """

    body: Common
    options: dict[str, Any]
    ignored: Ignored
    given: Mapping[str, str]
    prompts: Sequence[str] = ()
    echo: bool = False
    conversation: Conversation | None = None
    form: ReplyForm = field(default_factory=ReplyForm)
    enforce: bool | Literal["auto"] = "auto"
    variables: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    open_ended: bool = False
    echoed: Mapping[str, Any] | None = None

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar may have to be compiled, which takes time."""
        grammars = (self.options.get(name) for name in GRAMMARS)
        return not self.form.is_free or any(each is not None for each in grammars)

    @property
    def length_field(self) -> str:
        """The client's name for ``max_new_tokens``."""
        name = "max_tokens" if self.echoed is None else "max_output_tokens"
        return self.given.get("max_new_tokens", name)

    def error(self, error: BaseException) -> ApiError:
        """Return an error of the engine, with the name of the field in the request."""
        described = api_error(error)
        is_limit = described.type == LATE or described.code == CONTEXT_CODE
        if is_limit and not self.body.adafuse.rounds:  # else the client is a RemoteEngine
            described.message = described.message.replace("timeout=", "").replace(
                "max_new_tokens", self.length_field
            )
        option = described.param or ""
        if (name := self.given.get(option)) is not None:
            described.param = name
            described.message = described.message.replace(f"option {option!r}", f"field {name!r}")
        if described.param is None and described.code == CONTEXT_CODE:
            chat = "messages" if self.echoed is None else "input"
            described.param = "prompt" if self.conversation is None else chat
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
    turns = _turns(chat.messages, ignored)
    return ServedRequest(
        **conversational(chat, ignored, turns, response_format=chat.response_format),
        effort=chat.reasoning_effort,
    )


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
    asked = _shared(completion, ignored)
    if completion.logprobs is not None:
        asked["options"] |= {"logprobs": True, "top_logprobs": completion.logprobs}
        asked["given"]["top_logprobs"] = "logprobs"
        if completion.echo:
            raise invalid(
                "echo cannot be combined with logprobs, because the prompt has no "
                "log-probabilities; RemoteEngine has the method score",
                "echo",
            )
    prompts = [completion.prompt] if isinstance(completion.prompt, str) else completion.prompt
    if not prompts:
        raise invalid("prompt must be a text, or a list of at least one text", "prompt")
    return ServedRequest(prompts=prompts, echo=completion.echo, **asked)


def conversational(
    body: Conversational,
    ignored: Ignored,
    turns: Sequence[Turn],
    *,
    response_format: Mapping[str, Any] | None,
    place: str = "messages",
    format_place: str = "response_format",
) -> dict[str, Any]:
    """Return the arguments of `ServedRequest` for a request with a conversation.

    Args:
        body: the fields of the request.
        ignored: takes what is ignored.
        turns: the conversation.
        response_format: the form of replies without calls.
        place: name of the field with the conversation.
        format_place: name of the field with the form of replies.

    Raises:
        ApiError: a field has an invalid value, or two fields contradict each other.
    """
    asked = _shared(body, ignored)
    functions = _functions(body.tools, ignored)
    tools, choice = _tools(body, functions)
    with naming(format_place):
        schema = schema_of(response_format)
    form = ReplyForm(tools, choice, body.parallel_tool_calls, schema)
    named = (response_format or {}).get("json_schema") or response_format or {}
    is_strict = any(each.get("strict") is True for each in (*functions, named))
    constraint = next((name for name in CONSTRAINTS if name in asked["options"]), None)
    has_form = asked["enforce"] is not False and (form.calls_tools or form.schema is not None)
    if constraint is not None and has_form:
        name = asked["given"][constraint]
        raise invalid(
            f"{name} cannot be combined with {'tools' if form.calls_tools else format_place}, "
            "because both determine the form of the reply; send only one of them",
            name,
        )
    with naming(place):
        conversation = to_conversation(
            turns,
            tools=tools,
            tool_choice=choice,
            instructions="\n\n".join(filter(None, (form.instructions, body.adafuse.instructions))),
        )
    if any(map(malformed_calls, turns)):
        ignored.warnings.append(
            f"{place} has tool calls whose arguments are not a JSON object. Members read them as "
            "text."
        )
    if is_strict and asked["enforce"] == "auto":
        asked["enforce"] = True
    variables = body.chat_template_kwargs
    return {**asked, "conversation": conversation, "form": form, "variables": variables}


def _shared(body: Common, ignored: Ignored) -> dict[str, Any]:
    """Return the arguments of `ServedRequest` that all requests have in common."""
    options, given = body.options(ignored)
    asks_for_all = any((body.model_extra or {}).get(name) == NO_LIMIT for name in LENGTHS)
    return {
        "body": body,
        "options": options,
        "given": given,
        "ignored": ignored,
        "enforce": body.adafuse.enforce,
        "open_ended": asks_for_all and "max_new_tokens" not in options,
    }


def _tools(
    body: Conversational, functions: Sequence[Mapping[str, Any]]
) -> tuple[tuple[Tool, ...], str]:
    """Return the tools and the tool choice of a request."""
    with naming("tools"):
        tools = check_tools(functions)
    with naming("tool_choice"):
        return tools, to_tool_choice(body.tool_choice, [tool.name for tool in tools])


def _functions(tools: Sequence[Mapping[str, Any]], ignored: Ignored) -> list[Mapping[str, Any]]:
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


def read_conversation(
    body: Conversational, messages: Sequence[Message], ignored: Ignored
) -> Conversation:
    """Return a conversation for its tokens, without the form of a reply.

    Raises:
        ApiError: a message or a tool has an invalid form.
    """
    tools, choice = _tools(body, _functions(body.tools, ignored))
    turns = _turns(messages, ignored)
    instructions = body.adafuse.instructions
    with naming("messages"):
        return to_conversation(turns, tools=tools, tool_choice=choice, instructions=instructions)


def _turns(messages: Sequence[Message], ignored: Ignored) -> list[Turn]:
    """Return messages of OpenAI's API as turns."""
    turns: list[Turn] = []
    for number, each in enumerate(messages):
        content = readable(each.content)
        if each.role == "tool":
            content = readable_result(content, f"messages.{number}.content", ignored)
        turn: Any = {**dict(each), "content": content}
        turns.append(turn)
    return turns


def readable(content: Any) -> Any:
    """Return a message's content without its thoughts; refusals become text.

    Other parts that are not text, such as images, stay and are refused later.
    """
    if not isinstance(content, list):
        return content
    kept = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal":
            kept.append({"type": "text", "text": part.get("refusal")})
        elif kind not in THOUGHTS:
            kept.append(part)
    return kept


def readable_result(content: Any, place: str, ignored: Ignored) -> Any:
    """Return the content of a tool's result with a note in place of each part that is not text.

    Agents send a result again with every later turn, so it must not end their conversation.
    """
    if content is None or isinstance(content, str):
        return content
    parts = []
    for part in content if isinstance(content, list) else [content]:
        given = part if isinstance(part, Mapping) else {"text": part}
        is_text = isinstance(given.get("text"), str)
        parts.append(part if is_text else note_of(given.get("type"), place, ignored))
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
