"""Read requests in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from adafuse_llm.adapters.conversation import Turn, to_conversation
from adafuse_llm.adapters.reply_form import ReplyForm, schema_of, to_tool_choice
from adafuse_llm.config import CONSTRAINTS, AdaFuseConfig
from adafuse_llm.errors import InvalidInputError, nearest, short_repr
from adafuse_llm.serving.errors import CONTEXT_CODE, ApiError, api_error, invalid, option_of
from adafuse_llm.text.conversation import Conversation, check_tools

IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Fields that are accepted and change nothing."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that are not supported, with the values that change nothing. None is always one."""

REASONS: Mapping[str, str] = {
    "logit_bias": "token ids differ between members; send {'adafuse': {'logit_bias': {text: "
    "number}}}"
}
"""Why a field is not supported, and what to send instead."""

EXTENSION = "adafuse"
"""Name of the field with the options of the ensemble."""

TOKENS = ("max_tokens", "max_completion_tokens")
"""Fields for the option ``max_new_tokens``. The field of vLLM for ``min_new_tokens`` is
``min_tokens``."""

SAMPLING = (
    *("temperature", "top_p", "min_p", "seed", "n", "stop", "top_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields that are options of the engine under the same name."""

MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Keys of a message that the members may read."""

MESSAGE_NOISE = ("refusal", "annotations", "audio", "function_call", "adafuse")
"""Keys of messages that clients send back and that the members do not read."""


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Extension(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    strategy: str | None = None
    rounds: bool = False
    enforce: bool | Literal["auto"] = "auto"

    @field_validator("enforce", mode="before")
    @classmethod
    def _true_false_or_auto(cls, value: object) -> object:
        if value != "auto" and not isinstance(value, bool):
            raise ValueError("the value must be true, false or 'auto'")
        return value


class _Common(_Body):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    adafuse: _Extension | None = None


class _ChatBody(_Common):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None


class _CompletionBody(_Common):
    prompt: str | list[str]
    logprobs: int | None = None


@dataclass(frozen=True)
class ServedRequest:
    """A request to a model.

    Attributes:
        model: name of the model; None for the ensemble.
        strategy: name of the strategy; None for the model's own.
        options: options of `AdaFuseConfig`.
        given: the names of the options in the request, where they differ.
        prompts: the prompts of a completion.
        conversation: the conversation of a chat.
        form: the form of the reply.
        enforce: whether the form is enforced: True, False, or ``"auto"`` to describe a form that
            cannot be enforced to the members only.
        stream: whether the response is a stream.
        include_usage: whether the stream ends with the usage.
        rounds: whether the response has the rounds.
    """

    model: str | None
    strategy: str | None
    options: Mapping[str, Any]
    given: Mapping[str, str] = field(default_factory=dict)
    prompts: Sequence[str] = ()
    conversation: Conversation | None = None
    form: ReplyForm = field(default_factory=ReplyForm)
    enforce: bool | Literal["auto"] = "auto"
    stream: bool = False
    include_usage: bool = False
    rounds: bool = False

    @property
    def characters(self) -> int:
        """Size of the largest prompt, or of the conversation."""
        if self.conversation is None:
            return max(map(len, self.prompts))
        return self.conversation.characters

    def error(self, error: BaseException) -> ApiError:
        """Return an error of the engine, with the name of the field in the request."""
        described = api_error(error)
        option = described.param or ""
        if (name := self.given.get(option)) is not None:
            described.param = name
            described.message = described.message.replace(f"option {option!r}", f"field {name!r}")
        if described.param is None and described.code == CONTEXT_CODE:
            described.param = "prompt" if self.conversation is None else "messages"
        return described


def read_chat(body: dict[str, Any]) -> ServedRequest:
    """Read a request for a chat completion.

    Raises:
        ApiError: a field is unknown, not supported, or has an invalid value.
    """
    chat = _parse(_ChatBody, body)
    options, given = _options(chat, chat.max_completion_tokens)
    if chat.logprobs is not None:
        options["logprobs"] = chat.logprobs
    if chat.top_logprobs is not None:
        options["top_logprobs"] = chat.top_logprobs
        if not chat.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    form, strict = _form(chat)
    constraint = next((name for name in CONSTRAINTS if options.get(name) is not None), None)
    if constraint is not None and (form.calls_tools or form.schema is not None):
        other = "tools" if form.calls_tools else "response_format"
        raise invalid(
            f"adafuse.{constraint} cannot be combined with {other}, because both determine the "
            "form of the reply; send only one of them",
            given.get(constraint),
        )
    extension = chat.adafuse or _Extension()
    with _naming("messages"):
        conversation = to_conversation(
            [_turn(number, message) for number, message in enumerate(chat.messages)],
            tools=form.tools,
            tool_choice=form.choice,
            instructions=form.instructions,
        )
    return ServedRequest(
        options=options,
        given=given,
        conversation=conversation,
        form=form,
        enforce=True if strict and extension.enforce == "auto" else extension.enforce,
        **_shared(chat, extension),
    )


def read_completion(body: dict[str, Any]) -> ServedRequest:
    """Read a request for a completion.

    Raises:
        ApiError: a field is unknown, not supported, or has an invalid value.
    """
    completion = _parse(_CompletionBody, body)
    options, given = _options(completion)
    if completion.logprobs is not None:
        options |= {"logprobs": True, "top_logprobs": completion.logprobs}
        given["top_logprobs"] = "logprobs"
    prompts = completion.prompt
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not prompts:
        raise invalid("prompt must be a text, or a list of at least one text", "prompt")
    return ServedRequest(
        options=options,
        given=given,
        prompts=prompts,
        **_shared(completion, completion.adafuse or _Extension()),
    )


def _shared(body: _Common, extension: _Extension) -> dict[str, Any]:
    """Return the fields that chats and completions have in common."""
    return {
        "model": body.model,
        "strategy": extension.strategy,
        "stream": bool(body.stream),
        "include_usage": bool(body.stream_options and body.stream_options.include_usage),
        "rounds": extension.rounds,
    }


Body = TypeVar("Body", bound=_Common)


def _parse(kind: type[Body], body: dict[str, Any]) -> Body:
    """Check the fields of a body."""
    allowed = tuple(kind.model_fields)
    used = {}
    for name, value in body.items():
        if name in allowed:
            used[name] = value
        elif name in NEUTRAL:
            if value is not None and value not in NEUTRAL[name]:
                reason = f": {REASONS[name]}" if name in REASONS else ""
                raise invalid(
                    f"the field {name!r} is not supported{reason}; got {short_repr(value)}. Leave "
                    "it out.",
                    name,
                    "unsupported_parameter",
                )
        elif name not in IGNORED:
            raise invalid(
                f"unknown field {short_repr(name)}.{_advice(name, allowed)}",
                name[:100],
                "unknown_parameter",
            )
    if isinstance(prompt := used.get("prompt"), list) and any(
        not isinstance(each, str) for each in prompt
    ):
        raise invalid(
            "prompt must be a text or a list of texts; token ids are not supported, because every "
            "member has its own tokens",
            "prompt",
        )
    try:
        return kind.model_validate(used)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(str(part) for part in problem["loc"] if not _is_type(part))
        message = problem["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        shown = "" if problem["type"] == "missing" else f"; got {short_repr(problem['input'])}"
        raise invalid(f"{name}: {message}{shown}", name) from None


def _is_type(part: int | str) -> bool:
    """Return whether a part of a location is one of several types of a field, not a field."""
    return isinstance(part, str) and (part in ("str", "bool") or "[" in part)


def _advice(name: str, allowed: Sequence[str]) -> str:
    if name in AdaFuseConfig.model_fields:
        return f" It is an option of the ensemble: send {{{EXTENSION!r}: {{{name!r}: ...}}}}."
    return nearest(name, allowed) or f" Fields: {', '.join(allowed)}."


def _options(
    body: _Common, completion_tokens: int | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options of the engine in a body, and where the body has them."""
    options: dict[str, Any] = {}
    given: dict[str, str] = {}
    extension = {} if body.adafuse is None else dict(body.adafuse.model_extra or {})
    for name, value in extension.items():
        if name not in AdaFuseConfig.model_fields:
            names = (*_Extension.model_fields, *AdaFuseConfig.model_fields)
            raise invalid(
                f"unknown option {EXTENSION}.{name[:100]}.{nearest(name, names)} The options are: "
                f"{', '.join(names)}.",
                f"{EXTENSION}.{name[:100]}",
                "unknown_parameter",
            )
        options[name], given[name] = value, f"{EXTENSION}.{name}"
    sizes = dict(zip(TOKENS, (body.max_tokens, completion_tokens), strict=True))
    fields = {name: ("max_new_tokens", value) for name, value in sizes.items()}
    fields |= {name: (name, getattr(body, name, None)) for name in SAMPLING}
    fields["min_tokens"] = ("min_new_tokens", body.min_tokens)
    for name, (option, value) in fields.items():
        if value is None or name == "top_logprobs":
            continue
        if option in options and options[option] != value:
            raise invalid(
                f"{given.get(option, option)} and {name} are the same option; send only one of "
                "them",
                name,
            )
        options[option], given[option] = value, name
    return options, given


def _form(chat: _ChatBody) -> tuple[ReplyForm, bool]:
    """Return the form of the reply, and whether it has to be enforced."""
    with _naming("tools"):
        tools = check_tools(chat.tools or ())
    with _naming("tool_choice"):
        choice = to_tool_choice(chat.tool_choice, [tool.name for tool in tools])
    with _naming("response_format"):
        schema = schema_of(chat.response_format)
    strict = [tool.get("function", {}).get("strict") for tool in chat.tools or ()]
    strict.append(((chat.response_format or {}).get("json_schema") or {}).get("strict"))
    parallel = chat.parallel_tool_calls is not False
    return ReplyForm(tools, choice, parallel, schema), any(each is True for each in strict)


def _turn(number: int, message: dict[str, Any]) -> Turn:
    """Return a message of OpenAI's API as a turn."""
    known = {name: value for name, value in message.items() if name in MESSAGE_KEYS}
    for name, value in message.items():
        if name not in known and name not in MESSAGE_NOISE and value is not None:
            raise invalid(
                f"message {number} has {short_repr(name)}; allowed: {', '.join(MESSAGE_KEYS)}",
                f"messages.{number}",
            )
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(known.get(name), (str, type(None))):
            raise invalid(
                f"message {number}: {name} must be a text; got {short_repr(known[name])}",
                f"messages.{number}",
            )
    if (reasoning := known.pop("reasoning_content", None)) is not None:
        known["reasoning"] = reasoning
    turn: Turn = known  # type: ignore[assignment]
    return turn


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the field in errors about invalid input."""
    try:
        yield
    except InvalidInputError as error:
        raise invalid(str(error), option_of(error) or name) from error
