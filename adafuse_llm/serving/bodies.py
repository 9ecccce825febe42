"""Read the bodies of requests in the form of OpenAI's API.

Clients also send fields that only OpenAI's own service or other servers know. The server ignores
them with a warning. It refuses the few that determine the form or the subject of an answer, because
an answer that ignores them would be useless to the client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from adafuse_llm.adapters.conversation import Turn, to_conversation
from adafuse_llm.adapters.reply_form import ReplyForm, schema_of, to_tool_choice
from adafuse_llm.config import CONSTRAINTS, AdaFuseConfig, advice
from adafuse_llm.errors import InvalidInputError, nearest, short_repr
from adafuse_llm.remote.wire import EXTENSION
from adafuse_llm.serving.errors import CONTEXT_CODE, ApiError, api_error, invalid, option_of
from adafuse_llm.text.conversation import Conversation, check_tools, function_of, to_json

LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Fields that set the option ``max_new_tokens``."""

ALIASES = {**dict.fromkeys(LENGTHS, "max_new_tokens"), "min_tokens": "min_new_tokens"}
"""Fields that set an option of another name, each with this option."""

QUIET = frozenset(
    ("user", "metadata", "client_metadata", "safety_identifier", "service_tier", "prompt_cache_key")
) | {"add_generation_prompt"}
"""Fields that the server ignores without a warning, because they do not change the answer."""

NO_TOOLS = "this server has no tools of its own"
NO_STORE = "this server stores nothing"
NO_IDS = "token ids differ between members"
WHOLE = f"{NO_STORE}. Send the whole conversation in 'input'"
LARK = f"its dialect differs from Lark. Send {{{EXTENSION!r}: {{'grammar': ...}}}}"
FORM = "send response_format, json_schema, regex or choices"

REFUSED: Mapping[str, str] = {
    "assets": "the members read text",
    "audio": "the members write text",
    "background": NO_STORE,
    **dict.fromkeys(("conversation", "previous_response_id"), WHOLE),
    "instructions": "send a system message",
    "response_format": "send it to /v1/chat/completions, or text.format to /v1/responses",
    "text": "send response_format",
    "echo": "a response has new text only; RemoteEngine scores texts",
    **dict.fromkeys(("format", "guided_json", "guided_regex", "guided_choice"), FORM),
    "structured_outputs": FORM,
    "function_call": "send tool_choice",
    "functions": "send tools",
    **dict.fromkeys(("grammar", "guided_grammar"), LARK),
    "prompt": f"{NO_STORE}. Send messages or 'input'",
    "stop_token_ids": f"{NO_IDS}; send texts in stop",
    **dict.fromkeys(("tools", "tool_choice"), "send messages to /v1/chat/completions"),
    "suffix": "the members continue a text at its end only",
}
"""Fields that determine the form or the subject of an answer, each with a reason or advice. Routes
that do not support a field ignore it only if its value is, for example, false or an empty list."""

OWN = frozenset(
    ("margin_threshold", "max_words", "branching_factor", "max_word_tokens", "max_word_letters")
) | {"weights", "use", "calibration", "decisions"}
"""Options that only an ensemble has. Clients must send them in the field ``adafuse``, because
OpenAI's API may one day have fields with the same names."""

OPTIONS = frozenset((*ALIASES, *AdaFuseConfig.model_fields)) - REFUSED.keys() - OWN
"""Fields of a body, outside of ``adafuse``, that set an option of the engine."""

SIMILARITY = 0.8
"""Minimum similarity of a suggested field. With a lower one, ``store`` would suggest ``stream``."""

MAX_WARNINGS = 32
"""Once a request has so many warnings, the server adds none about further ignored fields."""


@dataclass
class Ignored:
    """Warnings about the ignored fields of a request."""

    warnings: list[str] = field(default_factory=list)

    def add(self, name: str, reason: str = "") -> None:
        """Warn that a field like ``a.b`` is ignored. `reason`: why, or what to send instead."""
        reason = f": {reason}" if reason else ""
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(f"the field {short_repr(name)} was ignored{reason}")


def refused(name: str, reason: str, value: object = None) -> ApiError:
    """Return the error for an unsupported field."""
    got = "" if value is None else f"; got {short_repr(value)}"
    return invalid(
        f"the field {short_repr(name)} is not supported{reason}{got}. Leave it out.",
        name[:100],
        "unsupported_parameter",
    )


def parse(kind: type[Kind], body: Mapping[str, Any], ignored: Ignored) -> Kind:
    """Validate a body as `kind`. Ignore or refuse fields that neither `kind` nor `OPTIONS` has."""
    known = OPTIONS | kind.model_fields.keys()
    sent = {name: value for name, value in body.items() if value is not None}
    for name, value in sent.items():
        if name in known:
            continue
        if name in REFUSED:
            if value and value not in ("none", "auto"):
                raise refused(name, f": {REFUSED[name]}", value)
        elif value is not False and name not in QUIET:
            advice = nearest(name, known, similarity=SIMILARITY).strip()
            ignored.add(name, f"send it in {EXTENSION!r}" if name in OWN else advice)
    try:
        return kind.model_validate(sent)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
    # pydantic's location also has types (str, bool, and names with a bracket), which are no fields
    names = [str(part) for part in problem["loc"] if part not in ("str", "bool")]
    name = ".".join(part for part in names if "[" not in part)
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    shown = "" if problem["type"] == "missing" else f"; got {short_repr(problem['input'])}"
    raise invalid(f"{name}: {message}{shown}", name)


THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
"""Types of content parts with reasoning of earlier replies. Members do not get these parts."""

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
MEDIA_PARTS = ("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url")
PARTS = (*TEXT_PARTS, *MEDIA_PARTS, "file", "input_file", "document", *THOUGHTS)
"""Types of content parts. If a tool's result has any other part, members read all of it as JSON."""


class Nested(BaseModel):
    """A part of a body. Unknown keys are ignored."""

    model_config = ConfigDict(strict=True)


class Message(Nested):
    """A message, with the fields that make a `Turn`. Other fields of clients are ignored."""

    role: str
    content: Any = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    tool_call_id: str | None = None
    reasoning: str | None = Field(default=None, alias="reasoning_content")


class StreamOptions(Nested):
    """What the client wants in a stream besides the responses."""

    include_usage: bool | None = None


class Extension(BaseModel):
    """The field ``adafuse`` of a request. Fields not declared here are options of the engine."""

    model_config = ConfigDict(strict=True, extra="allow")

    strategy: str | None = None
    rounds: bool = False
    as_engine: bool = False
    enforce: bool | Literal["auto"] = "auto"
    instructions: str = ""
    texts: list[str] | None = None
    ends: bool = False
    orders: int | None = None
    check: bool = False
    timeout: float | None = Field(default=None, gt=0)


class Body(BaseModel):
    """The body of a request, which can also have all `OPTIONS`.

    In errors, `PROMPT`, `FORM` and `LENGTH` name the fields of the prompt, the form and the length.
    """

    PROMPT: ClassVar[str] = "messages"
    FORM: ClassVar[str] = "response_format"
    LENGTH: ClassVar[str] = "max_tokens"

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    adafuse: Extension = Field(default_factory=Extension)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


Kind = TypeVar("Kind", bound=Body)


class Conversational(Body):
    """The body of a request with a conversation."""

    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    enable_thinking: bool | None = None


class _ChatBody(Conversational):
    messages: list[Message]
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class TokenizeBody(Body):
    """The body of a request for the tokens of a text."""

    PROMPT: ClassVar[str] = "prompt"

    prompt: str
    add_special_tokens: bool = True


class _CompletionBody(Body):
    PROMPT: ClassVar[str] = "prompt"

    prompt: str | list[str]
    logprobs: int | None = None


@dataclass
class ServedRequest:
    """A request of any kind, as the server has read it.

    Attributes:
        ignored: warnings for the client, mostly about ignored fields.
        options: options of `AdaFuseConfig`.
        names: by option, the name of its field in the request.
        enforce: whether to enforce `form`, as for `adapters.reply_form.enforced`.
        variables: variables for the chat templates that read them.
        effort: how much the members should reason; None for their own default.
        form: the form of the reply.
        echoed: the fields that a response of the Responses API repeats; None for the other APIs.
    """

    body: Body
    ignored: Ignored
    options: dict[str, Any]
    names: dict[str, str]
    enforce: bool | Literal["auto"] = "auto"
    prompts: Sequence[str] = ()
    conversation: Conversation | None = None
    form: ReplyForm = field(default_factory=ReplyForm)
    variables: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    echoed: Mapping[str, Any] | None = None

    def error(self, error: BaseException) -> ApiError:
        """Return an error as an `ApiError` that names the field of the request, not the option."""
        described = api_error(error)
        is_limit = described.status == 504 or described.code == CONTEXT_CODE
        if is_limit and not self.body.adafuse.as_engine:  # it needs the engine's names
            length = self.names.get("max_new_tokens", self.body.LENGTH)
            described.message = described.message.replace("timeout=", "")
            described.message = described.message.replace("max_new_tokens", length)
        option = described.param or ""
        if (name := self.names.get(option)) is not None:
            described.param = name
            described.message = described.message.replace(f"option {option!r}", f"field {name!r}")
        if described.param is None and described.code == CONTEXT_CODE:
            described.param = self.body.PROMPT
        return described


def read_options(body: Body, ignored: Ignored) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options in a body and, by option, the name of the field that sets it."""
    options: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in (body.adafuse.model_extra or {}).items():
        if name not in AdaFuseConfig.model_fields:
            known = (*Extension.model_fields, *AdaFuseConfig.model_fields)
            raise invalid(
                f"unknown option {EXTENSION}.{name[:100]}.{advice(name, known)}",
                f"{EXTENSION}.{name[:100]}",
                "unknown_parameter",
            )
        if value is not None or name not in CONSTRAINTS:
            options[name], names[name] = value, f"{EXTENSION}.{name}"
    for name, sent in (body.model_extra or {}).items():
        if name not in OPTIONS:
            continue
        option, value = ALIASES.get(name, name), sent
        if name == "logit_bias" and isinstance(value, dict):
            texts = {text: bias for text, bias in value.items() if not text.isdigit()}
            if len(texts) < len(value):
                ignored.add(name, f"{NO_IDS}; send texts")
            value = texts
        if options.get(option, value) != value:
            raise invalid(
                f"{names[option]} and {name} are the same option; send only one of them", name
            )
        options[option], names[option] = value, name
    return options, names


def read_chat(body: dict[str, Any], ignored: Ignored) -> ServedRequest:
    """Read a request for a chat completion."""
    chat = parse(_ChatBody, body, ignored)
    asked = ServedRequest(chat, ignored, *read_options(chat, ignored), effort=chat.reasoning_effort)
    turns: list[Any] = []
    for message in chat.messages:
        content = message.refusal if message.content is None else message.content
        read = readable(content, is_result=message.role == "tool")
        turn = {**dict(message), "content": read}
        if call := turn.pop("function_call"):  # the name of a single call in older clients
            turn["tool_calls"] = turn["tool_calls"] or [{"function": call}]
        turns.append(turn)
    converse(asked, chat, turns, chat.response_format)
    return asked


def read_tokenize(body: dict[str, Any], ignored: Ignored) -> ServedRequest:
    """Read a request for the tokens of a conversation or of a text."""
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise invalid("send either prompt or messages", "prompt")
    if body.get("messages") is not None:
        # templates write the special tokens of a conversation, even if the client wants none
        return read_chat({**body, "prompt": None, "add_special_tokens": None}, ignored)
    text = parse(TokenizeBody, body, ignored)
    return ServedRequest(text, ignored, *read_options(text, ignored), prompts=[text.prompt])


def read_completion(body: dict[str, Any], ignored: Ignored) -> ServedRequest:
    """Read a request for a completion."""
    sent = body.get("prompt")
    if isinstance(sent, list) and not (sent and all(isinstance(each, str) for each in sent)):
        raise invalid(
            "prompt must be a text, or a list of at least one text; token ids are not supported, "
            "because every member has its own tokens",
            "prompt",
        )
    completion = parse(_CompletionBody, body, ignored)
    prompts = [completion.prompt] if isinstance(completion.prompt, str) else completion.prompt
    options, names = read_options(completion, ignored)
    if completion.logprobs is not None:
        options |= {"logprobs": True, "top_logprobs": completion.logprobs}
        names["top_logprobs"] = "logprobs"
    return ServedRequest(completion, ignored, options, names, prompts=prompts)


def converse(
    asked: ServedRequest,
    body: Conversational,
    turns: Sequence[Turn],
    response_format: Mapping[str, Any] | None,
) -> None:
    """Add a conversation, the form of its reply and the variables of templates to a request."""
    asked.enforce = body.adafuse.enforce
    if body.tools or body.tool_choice is not None or response_format is not None:
        asked.form = whole = _form_of(asked, body, response_format)
        if asked.enforce is not True:
            asked.form = whole.after(turns)
        if asked.form.schema is not whole.schema:
            asked.ignored.warnings.append(
                f"{body.FORM} applies once a tool has answered, because small members would "
                'invent its values. To get it at once, send "strict": true.'
            )
    form = asked.form
    switch = {} if body.enable_thinking is None else {"enable_thinking": body.enable_thinking}
    asked.variables = {**switch, **body.chat_template_kwargs}
    with naming(body.PROMPT):
        asked.conversation = to_conversation(
            turns,
            tools=form.tools,
            tool_choice=form.choice,
            instructions="\n\n".join(filter(None, (form.instructions, body.adafuse.instructions))),
            warn=asked.ignored.warnings.append,
        )


def _form_of(
    asked: ServedRequest, body: Conversational, response_format: Mapping[str, Any] | None
) -> ReplyForm:
    functions = functions_of(body.tools, asked.ignored)
    with naming("tools"):
        tools = check_tools(functions)
    with naming("tool_choice"):
        choice = to_tool_choice(body.tool_choice, [tool.name for tool in tools])
    with naming(body.FORM):
        schema = schema_of(response_format)
    form = ReplyForm(tools, choice, body.parallel_tool_calls, schema)
    constraints = [asked.names[name] for name in CONSTRAINTS if name in asked.options]
    if constraints and asked.enforce is not False:
        with naming(constraints[0]):
            form.check_constraints(constraints, body.FORM)
    described = (response_format or {}).get("json_schema") or response_format or {}
    is_strict = any(each.get("strict") is True for each in (*functions, described))
    if is_strict and asked.enforce == "auto":
        asked.enforce = True
    return form


def functions_of(tools: Sequence[Mapping[str, Any]], ignored: Ignored) -> list[Mapping[str, Any]]:
    """Return the functions among the tools. Tools of other types cause warnings."""
    functions = []
    for number, tool in enumerate(tools):
        place, kind = f"tools.{number}", tool.get("type", "function")
        if kind != "function":
            ignored.add(place, f"it has the type {short_repr(kind)}, and {NO_TOOLS}")
            continue
        function = function_of(tool)
        if function.get("parameters") is None and any(
            isinstance(each, Mapping) for each in function.values()
        ):
            raise invalid(f"{place}: put the JSON schema of its input into 'parameters'", "tools")
        functions.append(function)
    return functions


def readable(content: Any, *, is_result: bool = False) -> Any:
    """Return the content of a message for `to_conversation`.

    Reasoning of earlier replies is left out, and a refusal becomes text. If the result of a tool
    (`is_result`) is neither a text nor a list of known parts, it becomes JSON.
    """
    if content is None or isinstance(content, str):
        return content
    sent = content if isinstance(content, list) else [content]
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in sent]
    if is_result and not (sent and all(kind in PARTS for kind in kinds)):
        return to_json(content)
    parts: list[Any] = []
    for kind, part in zip(kinds, sent, strict=True):
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            parts.append(part["refusal"])
        elif kind == "input_json":
            parts.append(to_json(part.get("data")))
        elif kind not in THOUGHTS:
            # members will read a note in place of a part that is not text
            parts.append(part if isinstance(part, (str, Mapping)) else {"type": "data"})
    return parts


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Turn an `InvalidInputError` into an `ApiError` that names its option, or `name`."""
    try:
        yield
    except InvalidInputError as error:
        raise invalid(str(error), option_of(error) or name) from error
