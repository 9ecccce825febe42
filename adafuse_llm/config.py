"""Options of decoding and of the engine. Once created, they are valid and never change."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
)
from pydantic.errors import PydanticUserError
from typing_extensions import Unpack

from adafuse_llm.calibration import Calibration, DecisionCalibration, some_weight
from adafuse_llm.errors import InvalidOptionError, nearest, short_repr
from adafuse_llm.tree.sampling import derived_seed

__all__ = ["AdaFuseConfig", "DecodeOptions", "RuntimeConfig"]

CONSTRAINTS = ("json_schema", "regex", "grammar", "choices")
"""Options that determine the form of the response. At most one of them can be set."""

GRAMMARS = ("json_schema", "regex", "grammar")
"""The `CONSTRAINTS` that llguidance enforces."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "n")
"""Options that concern the random draw of a response."""

ADJUSTMENTS = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "logit_bias",
)
"""Options that change every member's distributions before anything reads them."""

MAX_BIASED = 1024
"""Maximum number of texts in ``logit_bias``. Every member has to encode all of them."""

SEED_BITS = 63
"""Number of bits of a random seed."""

NO_LIMIT = -1
"""The value of `max_new_tokens` for as many tokens as the context windows leave."""

FREE_TOKENS, FORM_TOKENS = 256, 2048
"""Defaults of `max_new_tokens`: for free text, and for text in a form, such as JSON."""

DEFAULT_BRANCHES = 3
"""Default of `branching_factor`, B, where several members decode (§4.1)."""

MAX_WEIGHT = 1e12
"""The highest weight of a member. Sums of weighted scores stay far below the float limit."""

INSTEAD = {
    "members": " To choose among the loaded members, pass use=[...]. In a configuration file, they "
    "stand under 'models'.",
    "strategy": " Pass the strategy when you create the model or the engine, or use "
    "engine.with_strategy('single'). For one member alone, pass use=['name'].",
}
"""Advice for names that callers mistake for options, by name."""


def advice(name: str, allowed: Iterable[str], *, limit: int = 1, similarity: float = 0.6) -> str:
    """Return advice for an unknown option: what to do instead, `nearest` names, or all names."""
    names = [*dict.fromkeys(allowed)]
    return (
        INSTEAD.get(name)
        or nearest(name, names, limit=limit, similarity=similarity)
        or f" The options are: {', '.join(names)}."
    )


def explain(error: ValidationError, names: Sequence[str]) -> str:
    """Describe an error's first problem in one line: option, allowed values, actual value."""
    problems = error.errors(include_url=False, include_context=False)
    name, *inner = map(str, problems[0]["loc"] or ("options",))
    if problems[0]["type"] == "extra_forbidden":
        if inner:
            return f"option {name!r} has no entry {short_repr(inner[-1])}"
        return f"unknown option {short_repr(name)}.{advice(name, names)}"
    # a value that fits none of several types has a problem per type: the innermost explains most
    same = [problem for problem in problems if problem["loc"][:1] == problems[0]["loc"][:1]]
    problem = max(same, key=lambda one: len(one["loc"]))
    allowed = problem["msg"].removeprefix("Value error, ")
    allowed = (allowed[:1].lower() + allowed[1:]).replace("tuple", "list")
    return f"option {name!r}: {allowed}; got {short_repr(problem['input'])}"


def one_or_many(value: Any) -> Any:
    """Return a text as a tuple of one text, and anything else as it is."""
    return (value,) if isinstance(value, str) else value


def _check_unicode(text: str) -> str:
    text.encode()  # a UnicodeEncodeError is a ValueError, which pydantic reports
    return text


UNICODE = AfterValidator(_check_unicode)
Text = Annotated[str, Field(min_length=1), UNICODE]
Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]
Bias = Annotated[float, Field(ge=-100, le=100)]
ONE_OR_MANY = BeforeValidator(one_or_many)


class Options(BaseModel):
    """Base class of immutable options. The docstring below a field becomes its description.

    An invalid option raises an `InvalidOptionError` with a message of one line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())

    if not TYPE_CHECKING:  # type checkers derive the signature from the fields instead

        def __init__(self, **options: Any) -> None:
            try:
                super().__init__(**options)
            except ValidationError as error:
                raise InvalidOptionError(explain(error, list(type(self).model_fields))) from None


class RuntimeConfig(Options):
    """Options for how an engine runs requests. They change results at most by rounding.

    Raises:
        InvalidOptionError: an option is unknown or out of range.
    """

    drafting: bool = True
    """Evaluate likely continuations (other members' words, copies from the prompt) in advance, in
    forward passes that are necessary anyway."""
    max_requests: int = Field(default=16, ge=1)
    """Maximum number of requests decoded at the same time. Others wait."""
    max_waiting: int | None = Field(default=10_000, ge=0)
    """Maximum number of requests that wait while `max_requests` others are decoded. Further calls
    fail at once with `QueueFullError`. The engine accepts or refuses a batch as a whole, so an
    accepted batch can exceed the limit. None: no limit."""
    cache_bytes: int | None = Field(default=None, ge=1)
    """Maximum bytes of key/value cache that running requests hold on one device. A request that
    does not fit waits. The limit does not cover the logits of tree nodes (4 bytes per node and
    vocabulary entry), the activations of a forward pass, or the cache of finished requests
    (`prefix_cache_bytes` of a member). Default: half of the free memory, measured for each
    request."""


class DecodeOptions(TypedDict, total=False):
    """Types of the decoding options that calls take as keywords (see `AdaFuseConfig`)."""

    margin_threshold: float
    max_words: int
    branching_factor: int | None
    max_word_tokens: int
    max_word_letters: int
    max_new_tokens: int | None
    stop: str | Sequence[str] | None
    weights: Mapping[str, float] | Sequence[float] | None
    use: str | Sequence[str] | None
    json_schema: Mapping[str, Any] | type[BaseModel] | str | None
    regex: str | None
    grammar: str | None
    choices: Sequence[str] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    n: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    no_repeat_ngram_size: int | None
    min_new_tokens: int | None
    logit_bias: Mapping[str, float] | None
    logprobs: bool | None
    top_logprobs: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    calibration: Calibration | Mapping[str, Any] | None
    decisions: DecisionCalibration | Mapping[str, Any] | None


class AdaFuseConfig(Options):
    """Options of AdaFuse decoding (arXiv 2601.06022, §3 and §4.1).

    To change an option, make a copy with :meth:`override`. Decoding is deterministic unless
    ``temperature`` is above 0.

    Raises:
        InvalidOptionError: an option is unknown or out of range.
    """

    margin_threshold: float = Field(default=0.7, ge=0.0, le=1.0)
    """τ: a member is confident if the probability of its most likely token exceeds that of the
    second most likely one by at least this much (§3.2, equation 1)."""
    max_words: int = Field(default=3, ge=1, le=100)
    """M: maximum number of words in a span of a confident member (§3.2). At most 100."""
    branching_factor: int | None = Field(default=None, ge=1, le=100)
    """B: number of alternatives for the first word that a member is not confident of (§3.3). At
    most 100, because each alternative needs memory at every member. Default: 3. If only one
    member decodes, the strategy `adafuse` has a default of 1, so that the response is the
    member's own greedy text."""
    max_word_tokens: int = Field(default=16, ge=1, le=256)
    """Maximum number of tokens in a word. A longer one, as in scripts without spaces, is cut. At
    most 256."""
    max_word_letters: int = Field(default=4, ge=1, le=256)
    """Maximum number of letters in a word of a script without spaces (Chinese, Japanese, Thai, Lao,
    Khmer, Burmese). A word of one token may have more. At most 256."""
    max_new_tokens: Annotated[int, Field(ge=1)] | Literal[-1] | None = None
    """Maximum number of tokens of the response, in every member's tokens. A span that would exceed
    it is cut at a token. -1: as many as the context windows leave. Default: 256, and 2,048 if the
    response has a prescribed form or may call tools. If memory is short, -1 and the default stand
    for less."""
    stop: Annotated[tuple[Text, ...], ONE_OR_MANY] = ()
    """Stop sequences. The response ends right before the first one that appears."""
    weights: dict[str, Weight] | tuple[Weight, ...] | None = None
    """Weight of each member in the score, by name or in member order. Weights are from 0 to 1e12
    and not all zero. Default: equal weights (§3.4, equation 5); with the strategy mixture, the
    members' numbers of parameters."""
    use: Annotated[tuple[str, ...] | None, ONE_OR_MANY] = Field(default=None, min_length=1)
    """Names of the members that decode, in any order. Default: all members."""
    json_schema: dict[str, JsonValue] | None = None
    """JSON schema (draft 2020-12) that the response fits: a dict, JSON text, or a pydantic class.
    Objects of a pydantic class have no other properties than its fields, unless the class allows
    them. The response has one space after each comma and colon, and no other whitespace between
    values."""
    regex: Annotated[str | None, UNICODE] = None
    """Regular expression, in the syntax of Rust, that the response matches."""
    grammar: Annotated[str | None, UNICODE] = None
    """Lark grammar, in the dialect of llguidance, that the response fits."""
    choices: tuple[Text, ...] | None = Field(default=None, min_length=1)
    """Texts to choose from. The members score all of them, and the likeliest one becomes the
    response."""
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """0: nothing is drawn. With T above 0, every member draws its tokens: the chance of a token is
    proportional to its probability to the power of 1/T. The ensemble chooses among the drawn spans;
    with `mixture`, one member writes each word. A member then proposes one span, so
    `branching_factor` has no effect. `choices` are never drawn."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Draw only from the smallest set of likeliest tokens whose probabilities, after `temperature`
    and `top_k`, sum to at least this value."""
    top_k: int | None = Field(default=None, ge=1)
    """Draw only from this many likeliest tokens. 0 or -1: from all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Draw no token whose probability, after `temperature`, is less than this share of the
    likeliest token's."""
    seed: int | None = None
    """Integer that determines the draws. Default: a random seed, which the result reports."""
    n: int = Field(default=1, ge=1, le=128)
    """Number of responses to draw. The first has the seed `seed`; those of the others are derived
    from it. At most 128."""
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=100.0)
    """Make tokens of the prompt and the response less likely: this value divides a positive logit,
    and multiplies a negative one. 1: no penalty. Default: that of each member's
    `generation_config.json`. This option and the following ones, up to `logit_bias`, apply to
    every member in its own tokens, before F is computed. They have no effect on `choices`."""
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    """Number to subtract from the logit of every token that occurs in the response."""
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    """Number to subtract from the logit of a token for each of its occurrences in the response."""
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    """No sequence of this many tokens occurs twice in prompt and response. 0: no limit. Default:
    as for `repetition_penalty`."""
    min_new_tokens: int | None = Field(default=None, ge=0)
    """Minimum number of tokens of the response, in every member's tokens. Default: as for
    `repetition_penalty`."""
    logit_bias: dict[Text, Bias] | None = Field(default=None, max_length=MAX_BIASED)
    """Number from -100 to 100 to add to a text's logit, such as `{' Paris': 5}`. If a text has
    several tokens, the last one gets it, but only where the others precede it. Every member encodes
    a text as if it continued another. At most 1,024 texts."""
    logprobs: bool = False
    """Whether each round lists its committed tokens with their log-probabilities, by member."""
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """Number of likeliest tokens to list with each committed token. A number above 0 also turns
    on `logprobs`. At most 20."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Variables for the members' chat templates, such as `enable_thinking`."""
    continue_final_message: bool = False
    """Whether the response continues the last message, which must be an assistant's."""
    calibration: Calibration | None = None
    """Calibration that computes the `confidence` of a response, the probability that it is right.
    ``adafuse tune`` writes it into a configuration file. It must be fitted for the strategy and the
    members that decode. If a call lets other members decode, its responses have no confidence."""
    decisions: DecisionCalibration | None = None
    """Calibration that turns the members' answers to typed questions into probabilities
    (`Engine.decide`). ``adafuse tune --decide`` writes it. It must be fitted for the members that
    decode. It has no effect on responses, or on calls with ``use``, ``weights`` or ``orders``."""

    def __init__(self, **options: Unpack[DecodeOptions]) -> None:
        own = AdaFuseConfig.model_fields
        values = {name: v for name, v in options.items() if v is not None or name not in own}
        forms = [name for name in CONSTRAINTS if name in values]
        if len(forms) > 1:
            raise InvalidOptionError(
                f"only one of {', '.join(CONSTRAINTS)} can determine the form of a response; got "
                f"{' and '.join(forms)}"
            )
        super().__init__(**values)

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_as_dict(cls, schema: Any) -> Any:
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            return _schema_of_class(schema)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the text is not JSON ({error})") from None
        if not isinstance(schema, Mapping):
            raise ValueError(
                "a JSON schema must be a dict, JSON text of one, or a pydantic class; for another "
                "type, pass pydantic.TypeAdapter(type).json_schema()"
            )
        return schema

    @field_validator("json_schema", "chat_template_kwargs")
    @classmethod
    def _usable_json(cls, value: Any) -> Any:
        _check_unicode(json.dumps(value, ensure_ascii=False, allow_nan=False))
        return value

    @field_validator("choices")
    @classmethod
    def _usable_choices(cls, choices: tuple[str, ...]) -> tuple[str, ...]:
        if not all(choice.strip() for choice in choices) or len({*choices}) < len(choices):
            raise ValueError("choices must be different texts, each with a visible character")
        return choices

    @field_validator(*SAMPLING, *ADJUSTMENTS, "top_logprobs", mode="before")
    @classmethod
    def _no_bool(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("the value must be a number")
        return value

    _no_limit = field_validator("top_k", mode="before")(lambda k: None if k in (0, -1) else k)
    _some_weight = field_validator("weights")(some_weight)

    def override(self, options: Mapping[str, Any]) -> AdaFuseConfig:
        """Return a validated copy in which `options` replace the current values (None: default).

        A new value of one of the `CONSTRAINTS` also removes the others.

        Raises:
            InvalidOptionError: an option is unknown or out of range.
        """
        if not options:
            return self
        checked = AdaFuseConfig(**options)
        changes = {name: getattr(checked, name) for name in options}
        if any(options.get(name) is not None for name in CONSTRAINTS):
            changes = {**dict.fromkeys(CONSTRAINTS), **changes}
        return self.model_copy(update=changes)

    def most_tokens(self, *, has_form: bool = False) -> int:
        """Return `max_new_tokens` as a number.

        `has_form`: whether the response has a form that no option sets, such as that of tool calls.
        """
        if self.max_new_tokens is None:
            has_constraint = any(getattr(self, name) is not None for name in CONSTRAINTS)
            return FORM_TOKENS if has_form or has_constraint else FREE_TOKENS
        return sys.maxsize if self.max_new_tokens == NO_LIMIT else self.max_new_tokens

    @property
    def branches(self) -> int:
        """B: `branching_factor` or its default."""
        return DEFAULT_BRANCHES if self.branching_factor is None else self.branching_factor

    @property
    def counted_logprobs(self) -> int | None:
        """`top_logprobs`, or None if rounds list no log-probabilities at all."""
        return self.top_logprobs if self.logprobs or self.top_logprobs else None

    def seeds(self) -> tuple[int, ...]:
        """Return `n` seeds: `seed` or else a random one, and others derived from the first."""
        first = secrets.randbits(SEED_BITS) if self.seed is None else self.seed
        return (first, *(derived_seed(first, f"response {number}") for number in range(1, self.n)))

    def check_n(self) -> None:
        """Raise an InvalidOptionError if `n` responses would be the same."""
        if self.n > 1 and (not self.temperature or self.choices is not None):
            raise InvalidOptionError(
                "option 'n': all responses would be the same without a temperature above 0, and "
                f"with choices, which are never drawn; got {self.n}"
            )

    def member_weights(self, members: Sequence[str]) -> dict[str, float]:
        """Return the weights of the members that decode, by name, in the order of `members`.

        Raises:
            InvalidOptionError: ``use`` or ``weights`` do not match the members.
        """
        names = members if self.use is None else self.use
        if self.weights is None:
            weights = dict.fromkeys(members, 1.0)
        elif isinstance(self.weights, dict):
            weights = self.weights
        elif len(self.weights) == len(members):
            weights = dict(zip(members, self.weights, strict=True))
        else:
            raise InvalidOptionError(
                f"option 'weights' must have one value per member ({len(members)}); "
                f"got {len(self.weights)}"
            )
        for option, used in (("use", names), ("weights", weights)):
            for name in used:
                if name not in members:
                    raise InvalidOptionError(
                        f"option {option!r}: there is no member {short_repr(name)}."
                        f"{nearest(name, members)} Members: {', '.join(members)}."
                    )
        if missing := [name for name in names if name not in weights]:
            raise InvalidOptionError(
                "option 'weights' must name every member that decodes; missing: "
                f"{', '.join(missing)}"
            )
        if not any(weights[name] for name in names):
            raise InvalidOptionError(
                f"option 'weights': all members that decode ({', '.join(names)}) have weight 0"
            )
        return {name: weights[name] for name in members if name in names}


def _schema_of_class(model: type[BaseModel]) -> dict[str, Any]:
    # forbid properties that are not fields, unless the class allows them
    try:
        schema = model.model_json_schema()
    except PydanticUserError as error:
        raise ValueError(f"pydantic cannot write the schema of {model.__name__}: {error}") from None
    for part in (schema, *schema.get("$defs", {}).values()):
        if "properties" in part:
            part.setdefault("additionalProperties", False)
    return schema
