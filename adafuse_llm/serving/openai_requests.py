"""Read requests in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from adafuse_llm.adapters.conversation import Turn, malformed_calls, to_conversation
from adafuse_llm.adapters.reply_form import ReplyForm, schema_of, to_tool_choice
from adafuse_llm.config import CONSTRAINTS, GRAMMARS, MAX_BIASED, AdaFuseConfig
from adafuse_llm.errors import InvalidInputError, nearest, short_repr
from adafuse_llm.serving.errors import CONTEXT_CODE, LATE, ApiError, api_error, invalid, option_of
from adafuse_llm.serving.openai_fields import NO_IDS, NO_TOOLS, Ignored, parse
from adafuse_llm.text.conversation import Conversation, check_tools
from adafuse_llm.wire import EXTENSION

TOKENS = ("max_tokens", "max_completion_tokens", "n_predict", "max_output_tokens")
"""Fields for the option ``max_new_tokens``."""

NO_LIMIT = -1
"""The value of these fields that asks for the rest of the context window."""

OPTIONS = {
    "min_tokens": "min_new_tokens",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
}
"""Fields of vLLM for options of the engine with another name."""

SAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "top_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "no_repeat_ngram_size"),
    *("json_schema", "regex", "continue_final_message"),
)
"""Fields that are options of the engine under the same name."""

STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choices"}
"""Keys of vLLM's field ``structured_outputs`` and the options of the engine."""

MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Keys of a message that the members may read. Clients send many others, which are ignored."""

THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
"""Types of content parts that are reasoning of earlier replies, which members do not read there."""

FUNCTION_KEYS = ("name", "description", "parameters", "strict")
FORMAT_KEYS = ("name", "description", "schema", "strict")
"""Keys of a function, and of the ``json_schema`` in a ``response_format``."""

ROUND_TRIP = ("cache_control", "provider_specific_fields")
"""Keys of tools that promise nothing about the answer."""


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Extension(BaseModel):
    """The field with the options of the ensemble."""

    model_config = ConfigDict(strict=True, extra="allow")

    strategy: str | None = None
    rounds: bool = False
    enforce: bool | Literal["auto"] = "auto"
    instructions: str = ""
    texts: list[str] | None = None
    ends: bool = False
    check: bool = False
    timeout: float | None = Field(default=None, gt=0)

    @field_validator("enforce", mode="before")
    @classmethod
    def _true_false_or_auto(cls, value: object) -> object:
        if value != "auto" and not isinstance(value, bool):
            raise ValueError("the value must be true, false or 'auto'")
        return value


class Extended(Body):
    """The fields of requests with options of the ensemble."""

    model: str | None = None
    adafuse: Extension | None = None


class Common(Extended):
    """The fields that all requests for responses can have."""

    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    seed: int | None = None


class Conversational(Common):
    """The fields of requests with a conversation."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _AnyCompletion(Common):
    max_tokens: int | None = None
    n_predict: int | None = None
    n: int | None = None
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None


class _ChatBody(_AnyCompletion, Conversational):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class _CompletionBody(_AnyCompletion):
    prompt: str | list[str]
    logprobs: int | None = None
    echo: bool | None = None


@dataclass(frozen=True)
class ServedRequest:
    """A request to a model.

    Attributes:
        model: name of the model; None for the ensemble.
        strategy: name of the strategy; None for the model's own.
        options: options of `AdaFuseConfig`.
        ignored: the parts of the request that were ignored, and other warnings for the client.
        given: the names of the options in the request, where they differ.
        prompts: the prompts of a completion.
        echo: whether each completion begins with its prompt.
        conversation: the conversation of a chat.
        form: the form of the reply.
        enforce: whether the form is enforced: True, False, or ``"auto"`` to describe a form that
            cannot be enforced to the members only.
        variables: variables for the chat templates that read them.
        effort: how much the members reason; None for their own default.
        open_ended: whether the response may fill the context window.
        stream: whether the response is a stream.
        include_usage: whether the stream ends with the usage.
        rounds: whether the response has the rounds.
        texts: texts to score instead of decoding, as in `Request`; None to decode.
        ends: as in `Request`.
        check: whether to check the options only, without decoding.
        timeout: maximum seconds that the request waits and decodes; None for the server's limit.
        echoed: the fields that a response of the Responses API repeats; None for the other APIs.
    """

    model: str | None
    strategy: str | None
    options: Mapping[str, Any]
    ignored: Ignored
    given: Mapping[str, str] = field(default_factory=dict)
    prompts: Sequence[str] = ()
    echo: bool = False
    conversation: Conversation | None = None
    form: ReplyForm = field(default_factory=ReplyForm)
    enforce: bool | Literal["auto"] = "auto"
    variables: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    open_ended: bool = False
    stream: bool = False
    include_usage: bool = False
    rounds: bool = False
    texts: Sequence[str] | None = None
    ends: bool = False
    check: bool = False
    timeout: float | None = None
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
        if is_limit and not self.rounds:  # else the client is a RemoteEngine
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
        ApiError: a field is unknown, not supported, or has an invalid value.
    """
    chat = parse(_ChatBody, body, ignored)
    if chat.add_generation_prompt is False and not chat.continue_final_message:
        raise invalid(
            "add_generation_prompt: false needs continue_final_message: true",
            "add_generation_prompt",
        )
    turns = [_turn(number, each, ignored) for number, each in enumerate(chat.messages)]
    asked = conversational(
        chat, ignored, turns, response_format=chat.response_format, effort=chat.reasoning_effort
    )
    if chat.logprobs is not None:
        asked["options"]["logprobs"] = chat.logprobs
    if chat.top_logprobs is not None and not chat.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return ServedRequest(**asked)


def read_completion(body: dict[str, Any], ignored: Ignored) -> ServedRequest:
    """Read a request for a completion.

    Args:
        body: the body of the request.
        ignored: takes what is ignored.

    Raises:
        ApiError: a field is unknown, not supported, or has an invalid value.
    """
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
    prompts = completion.prompt
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not prompts:
        raise invalid("prompt must be a text, or a list of at least one text", "prompt")
    return ServedRequest(prompts=prompts, echo=bool(completion.echo), **asked)


def conversational(
    body: Conversational,
    ignored: Ignored,
    turns: Sequence[Turn],
    *,
    response_format: Mapping[str, Any] | None,
    effort: str | None,
    place: str = "messages",
    format_place: str = "response_format",
) -> dict[str, Any]:
    """Return the arguments of `ServedRequest` for a request with a conversation.

    Args:
        body: the fields of the request.
        ignored: takes what is ignored.
        turns: the conversation.
        response_format: the form of replies without calls.
        effort: how much the members reason.
        place: name of the field with the conversation.
        format_place: name of the field with the form of replies.

    Raises:
        ApiError: a field has an invalid value, or two fields contradict each other.
    """
    asked = _shared(body, ignored)
    form, strict = _form(body, response_format, format_place, ignored)
    constraint = next((name for name in CONSTRAINTS if name in asked["options"]), None)
    has_form = asked["enforce"] is not False and (form.calls_tools or form.schema is not None)
    if constraint is not None and has_form:
        other = "tools" if form.calls_tools else format_place
        name = asked["given"][constraint]
        raise invalid(
            f"{name} cannot be combined with {other}, because both determine the form of the "
            "reply; send only one of them",
            name,
        )
    texts = [form.instructions, "" if body.adafuse is None else body.adafuse.instructions]
    with naming(place):
        conversation = to_conversation(
            turns,
            tools=form.tools,
            tool_choice=form.choice,
            instructions="\n\n".join(filter(None, texts)),
        )
    if any(map(malformed_calls, turns)):
        ignored.warnings.append(
            f"{place} has tool calls whose arguments are not a JSON object. Members read them as "
            "text."
        )
    if strict and asked["enforce"] == "auto":
        asked["enforce"] = True
    return {
        **asked,
        "conversation": conversation,
        "form": form,
        "variables": body.chat_template_kwargs or {},
        "effort": effort,
    }


def _shared(body: Common, ignored: Ignored) -> dict[str, Any]:
    """Return the arguments of `ServedRequest` that all requests have in common."""
    options, given = read_options(body)
    extension = body.adafuse or Extension()
    stream_options = body.stream_options or {}
    for name, value in stream_options.items():
        if name not in ("include_usage", "include_obfuscation") and value:
            ignored.add(f"stream_options.{name}")
    include_usage = stream_options.get("include_usage")
    if not isinstance(include_usage, (bool, type(None))):
        raise invalid(
            f"stream_options.include_usage must be true or false; got {short_repr(include_usage)}",
            "stream_options.include_usage",
        )
    biases = body.logit_bias or {}
    if len(biases) > MAX_BIASED:  # before each of them is encoded
        raise invalid(
            f"logit_bias can have at most {MAX_BIASED} entries; got {len(biases)}", "logit_bias"
        )
    texts = {text: bias for text, bias in biases.items() if not (text.isascii() and text.isdigit())}
    if len(texts) < len(biases):
        ignored.add("logit_bias", f"{NO_IDS}; send texts in adafuse.logit_bias")
    if texts and options.setdefault("logit_bias", texts) is not texts:
        raise invalid(
            "adafuse.logit_bias and logit_bias are the same option; send only one of them",
            "logit_bias",
        )
    return {
        "model": body.model,
        "strategy": extension.strategy,
        "options": options,
        "given": given,
        "ignored": ignored,
        "enforce": extension.enforce,
        "open_ended": "max_new_tokens" not in options
        and any(getattr(body, name, None) == NO_LIMIT for name in TOKENS),
        "stream": bool(body.stream),
        "include_usage": bool(include_usage),
        "rounds": extension.rounds,
        "texts": extension.texts,
        "ends": extension.ends,
        "check": extension.check,
        "timeout": extension.timeout,
    }


def read_options(body: Extended) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options of the engine in a body, and where the body has them.

    Raises:
        ApiError: an option is unknown, or the body has two values of it.
    """
    options: dict[str, Any] = {}
    given: dict[str, str] = {}
    extension = {} if body.adafuse is None else dict(body.adafuse.model_extra or {})
    for name, value in extension.items():
        if name not in AdaFuseConfig.model_fields:
            names = (*Extension.model_fields, *AdaFuseConfig.model_fields)
            raise invalid(
                f"unknown option {EXTENSION}.{name[:100]}.{nearest(name, names)} The options are: "
                f"{', '.join(names)}.",
                f"{EXTENSION}.{name[:100]}",
                "unknown_parameter",
            )
        if value is not None or name not in CONSTRAINTS:
            options[name], given[name] = value, f"{EXTENSION}.{name}"
    fields = [(name, "max_new_tokens") for name in TOKENS]
    fields += [(name, name) for name in SAME]
    fields += OPTIONS.items()
    values = [(name, option, getattr(body, name, None)) for name, option in fields]
    for key, value in (getattr(body, "structured_outputs", None) or {}).items():
        if key not in STRUCTURED and value is not None:
            raise invalid(
                f"structured_outputs has {short_repr(key)}; allowed: {', '.join(STRUCTURED)}",
                "structured_outputs",
            )
        values.append((f"structured_outputs.{key}", STRUCTURED.get(key, ""), value))
    for name, option, value in values:
        if value is None or (name in TOKENS and value == NO_LIMIT):
            continue
        if option in options and options[option] != value:
            raise invalid(
                f"{given.get(option, option)} and {name} are the same option; send only one of "
                "them",
                name,
            )
        options[option], given[option] = value, name
    return options, given


def _form(
    body: Conversational, response_format: Mapping[str, Any] | None, place: str, ignored: Ignored
) -> tuple[ReplyForm, bool]:
    """Return the form of the reply, and whether it has to be enforced."""
    parallel = body.parallel_tool_calls is not False
    if body.tools is None and body.tool_choice is None and response_format is None:
        return ReplyForm(choice="auto", parallel=parallel), False
    given = _functions(body.tools or (), ignored)
    with naming("tools"):
        tools = check_tools(given)
    with naming("tool_choice"):
        choice = to_tool_choice(body.tool_choice, [tool.name for tool in tools])
    with naming(place):
        schema = schema_of(response_format)
    named = _check_format(response_format or {}, place, ignored)
    strict = [each.get("strict") for each in (*given, named)]
    return ReplyForm(tools, choice, parallel, schema), any(each is True for each in strict)


def _functions(tools: Sequence[Mapping[str, Any]], ignored: Ignored) -> list[Mapping[str, Any]]:
    """Return the functions of tools. Tools of other types are ignored."""
    functions = []
    for number, tool in enumerate(tools):
        place, kind = f"tools.{number}", tool.get("type", "function")
        if kind == "function":
            functions.append(_function(place, tool, ignored))
        else:
            ignored.add(place, f"it has the type {short_repr(kind)}, and {NO_TOOLS}")
    return functions


def _function(place: str, tool: Mapping[str, Any], ignored: Ignored) -> Mapping[str, Any]:
    """Return the function of a tool. Schemas under other names are errors."""
    function = tool.get("function")
    if isinstance(function, Mapping):
        ignored.keep(tool, ("type", "function", *ROUND_TRIP), place)
    else:
        function = {name: value for name, value in tool.items() if name != "type"}
    known = (*FUNCTION_KEYS, *ROUND_TRIP)
    others = [name for name, value in function.items() if name not in known and value is not None]
    if function.get("parameters") is None and any(
        isinstance(function[name], Mapping) for name in others
    ):
        raise invalid(
            f"{place} has {short_repr(others[0])} but no 'parameters'; put the JSON schema of the "
            "arguments into 'parameters'",
            "tools",
        )
    return ignored.keep(function, known, place)


def _check_format(given: Mapping[str, Any], place: str, ignored: Ignored) -> Mapping[str, Any]:
    """Check the keys of a format that `schema_of` has read, and return those beside the schema."""
    inner = given.get("json_schema")
    if isinstance(inner, Mapping):
        ignored.keep(given, ("type", "json_schema"), place)
        return ignored.keep(inner, FORMAT_KEYS, f"{place}.json_schema")
    return ignored.keep(given, ("type", *FORMAT_KEYS), place)


def read_conversation(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    instructions: str,
    ignored: Ignored,
) -> Conversation:
    """Return a conversation for its tokens, without the form of a reply.

    Raises:
        ApiError: a message or a tool has an invalid form.
    """
    with naming("tools"):
        checked = check_tools(_functions(tools, ignored))
    with naming("tool_choice"):
        choice = to_tool_choice(tool_choice, [tool.name for tool in checked])
    turns = [_turn(number, each, ignored) for number, each in enumerate(messages)]
    with naming("messages"):
        return to_conversation(turns, tools=checked, tool_choice=choice, instructions=instructions)


def _turn(number: int, message: dict[str, Any], ignored: Ignored) -> Turn:
    """Return a message of OpenAI's API as a turn. Keys that members do not read are ignored."""
    known = {name: value for name, value in message.items() if name in MESSAGE_KEYS}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(known.get(name), (str, type(None))):
            raise invalid(
                f"message {number}: {name} must be a text; got {short_repr(known[name])}",
                f"messages.{number}",
            )
    if (reasoning := known.pop("reasoning_content", None)) is not None:
        known["reasoning"] = reasoning
    content = readable(known.get("content"))
    if known.get("role") == "tool":
        content = readable_result(content, f"messages.{number}.content", ignored)
    known["content"] = content
    turn: Turn = known  # type: ignore[assignment]
    return turn


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
    ignored.note(place, f"the members read {short_repr(name)} in {place} as a short text")
    return f"[{name}, not shown]"


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Name the field in errors about invalid input."""
    try:
        yield
    except InvalidInputError as error:
        raise invalid(str(error), option_of(error) or name) from error
