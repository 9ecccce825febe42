"""The base class of the two LangChain models, with their fields, ensemble and decoding."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, closing, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from langchain_core.exceptions import ContextOverflowError
from langchain_core.load.serializable import Serializable
from langchain_core.messages.ai import UsageMetadata
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from typing_extensions import Self, TypedDict, Unpack

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    ContextWindowError,
    Generation,
    RuntimeConfig,
    StreamEvent,
)
from adafuse_llm.adapters.ensembles import Ensemble, fields_from_config
from adafuse_llm.adapters.options import check_option_names
from adafuse_llm.config import CONSTRAINTS, Options, explain
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, nearest
from adafuse_llm.summary import RoundDetail, Summary
from adafuse_llm.text.codec import TextCodec
from langchain_adafuse._rounds import SUMMARY_KEY, ModelRun, RoundReporter

if TYPE_CHECKING:
    import torch
    from langchain_core.caches import BaseCache
    from langchain_core.callbacks import Callbacks
    from langchain_core.language_models.model_profile import ModelProfile
    from langchain_core.rate_limiters import BaseRateLimiter

    from adafuse_llm import MemberSpec

    Members = Sequence[str | MemberSpec | dict[str, Any]] | Literal["embedded"] | None
else:  # pydantic would need torch to resolve the types in MemberSpec
    Members = Any

OPTIONS = (*(name for name in AdaFuseConfig.model_fields if name != "use"), "temperature")
PER_CALL = ("use", "model", "temperature", "timeout", "max_retries", "round_detail", "trace_rounds")
MEMBERS_VARIABLE = "ADAFUSE_MEMBERS"
"""Environment variable with the default members, separated by commas."""

ACCEPTED = ("api_key", "stream")
"""Keywords that LangChain passes to every model and that have no effect here."""

TOKEN_KINDS = ("input_tokens", "output_tokens", "total_tokens")

FINISH_REASONS = {"stop_sequence": "stop"}

RoundRecords = list[dict[str, Any]]


class ModelFields(TypedDict, total=False):
    """The keyword arguments of `AdaFuseLLM` and `ChatAdaFuse`, for type checkers."""

    margin_threshold: float | None
    max_words: int | None
    branching_factor: int | None
    max_word_tokens: int | None
    max_new_tokens: int | None
    stop: str | Sequence[str] | None
    weights: Mapping[str, float] | Sequence[float] | None
    use: str | Sequence[str] | None
    json_schema: Mapping[str, Any] | type[BaseModel] | str | None
    regex: str | None
    grammar: str | None
    choices: Sequence[str] | None
    temperature: float | None
    members: Members
    engine: AdaFuseEngine | None
    dtype: str | torch.dtype
    device_map: str | None
    revision: str | None
    trust_remote_code: bool
    runtime: RuntimeConfig | None
    model: str | list[str] | None
    max_tokens: int | None
    max_completion_tokens: int | None
    num_predict: int | None
    num_return_sequences: int | None
    stop_sequences: str | Sequence[str] | None
    timeout: float | None
    max_retries: int | None
    streaming: bool | None
    round_detail: RoundDetail
    trace_rounds: bool
    api_key: object
    stream: object
    name: str | None
    cache: BaseCache | bool | None
    verbose: bool
    callbacks: Callbacks
    tags: list[str] | None
    metadata: dict[str, Any] | None
    custom_get_token_ids: Callable[[str], list[int]] | None
    rate_limiter: BaseRateLimiter | None
    disable_streaming: bool | Literal["tool_calling"]
    output_version: str | None
    profile: ModelProfile | None


class EnsembleModel(Serializable):
    """The base class of `AdaFuseLLM` and `ChatAdaFuse`. Creating a model loads nothing.

    If a decoding option is None, the engine's value applies (see `AdaFuseConfig`). Every call can
    override the decoding options, `model`, `timeout`, `round_detail` and `trace_rounds`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    members: Members = None
    """Folders, hub ids or `MemberSpec` objects; or ``"embedded"`` for the small models that ship
    with adafuse-llm. Models with the same members share their weights."""
    engine: AdaFuseEngine | None = None
    """An existing engine to use instead of `members`."""
    dtype: Any = "auto"
    """Dtype of the weights, such as ``"bfloat16"``."""
    device_map: str | None = None
    """Devices for the weights; ``"auto"`` divides the devices' memory among the members."""
    revision: str | None = None
    """Revision of hub models."""
    trust_remote_code: bool = False
    """Whether to run code from model repositories."""
    runtime: RuntimeConfig | None = None
    """Settings of the engine's scheduler and caches."""

    use: str | list[str] | None = None
    """Names of the active members, a subset of `members`. Default: all."""
    model: str | list[str] | None = None
    """LangChain's name for `use`. A string can contain several names, joined by ``+``."""
    margin_threshold: float | None = None
    max_words: int | None = None
    branching_factor: int | None = None
    max_word_tokens: int | None = None
    max_new_tokens: int | None = None
    """Also accepted as `max_tokens` and `max_completion_tokens`."""
    stop: list[str] | str | None = None
    weights: dict[str, float] | list[float] | None = None
    json_schema: dict[str, Any] | None = None
    """Schema that the whole response fits; also accepts JSON text or a pydantic class. At most one
    of `json_schema`, `regex`, `grammar` and `choices` can be set."""
    regex: str | None = None
    grammar: str | None = None
    choices: list[str] | None = None
    temperature: float | None = None
    """Must be 0 if set, because decoding is deterministic."""

    timeout: float | None = Field(default=None, gt=0, le=threading.TIMEOUT_MAX, allow_inf_nan=False)
    """Time limit of a call in seconds, excluding loading; a longer call raises `TimeoutError`."""
    max_retries: int | None = None
    """Has no effect: decoding is deterministic, so a failed call would fail again."""
    streaming: bool | None = None
    round_detail: RoundDetail = "summary"
    """What messages contain about the rounds: ``"summary"`` for a summary of all rounds (rounds
    backed and decided, agreement, margins), ``"full"`` to add a record of each round, or
    ``"none"``. Events and callbacks receive full records, except with ``"none"``."""
    trace_rounds: bool = False
    """Whether to report each round as a child run. Use it for tracers that do not show custom
    events, such as LangSmith."""

    if TYPE_CHECKING:

        def __init__(self, **fields: Unpack[ModelFields]) -> None: ...

    else:

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise _one_error(error, type(self)) from None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        checked = check_option_names(given, extra=(*cls.model_fields, *ACCEPTED))
        checked = {name: value for name, value in checked.items() if name not in ACCEPTED}
        checked = _with_plain_schema(checked)
        if checked.get("engine") is None and not checked.get("members"):
            paths = os.environ.get(MEMBERS_VARIABLE, "").split(",")
            checked["members"] = [path.strip() for path in paths if path.strip()]
        return checked

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        AdaFuseConfig().override({**self._options, "use": self._chosen_names()})
        if (self.engine is None) == (not self.members):
            if self.engine is None and (given := self.use or self.model):
                paths = [given] if isinstance(given, str) else given
                raise InvalidInputError(
                    f"model={given!r} selects from the loaded members, but no members are given. "
                    f"To load models, pass members={paths!r}, with the folder or hub id of each"
                )
            raise InvalidInputError(
                "pass either members=[...] (folders or hub ids) or engine=...; "
                f"{type(self).__name__}.from_embedded() uses the small models that ship with "
                "adafuse-llm"
            )
        self._check_choice()
        return self

    @classmethod
    def from_embedded(cls, **fields: Unpack[ModelFields]) -> Self:
        """Create a model from the three small members that ship with adafuse-llm."""
        given: dict[str, Any] = {**fields}
        return cls(members="embedded", **given)

    @classmethod
    def from_config(cls, path: str | os.PathLike[str], **fields: Unpack[ModelFields]) -> Self:
        """Create a model from a configuration file, such as one written by ``adafuse tune``.

        Args:
            path: a YAML or JSON file; see `adafuse_llm.loading.config_file`.
            **fields: other fields, which override the file.

        Raises:
            InvalidInputError: the file cannot be read, or has unknown or invalid content.
        """
        return cls(**{"members": "embedded", **fields_from_config(path), **fields})

    def warmup(self) -> Self:
        """Load the members now instead of on the first call; return the model."""
        self._loaded()
        return self

    def unload(self) -> None:
        """Release the members. The next call loads them again.

        This affects all models that share the members. An engine passed as `engine` stays open.
        """
        self._ensemble.unload()

    @property
    def model_name(self) -> str:
        """Names of the active members, joined by ``+``."""
        return "+".join(self._names)

    @property
    def _names(self) -> tuple[str, ...]:
        chosen = self._chosen
        if chosen is None and self.engine is not None:
            chosen = self.engine.config.use
        names = self._ensemble.names
        return tuple(name for name in names if chosen is None or name in chosen)

    @property
    def max_tokens(self) -> int | None:
        """LangChain's name for `max_new_tokens`."""
        return self.max_new_tokens

    def get_token_ids(self, text: str) -> list[int]:
        """Encode a text with the first active member's tokenizer. This loads the members."""
        return self._first_codec().encode_prompt(text)

    # Serialization ----------------------------------------------------------------------------

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @property
    def lc_attributes(self) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        if self._ensemble.members:
            specs = self._ensemble.identity["members"]
            plain["members"] = [{k: v for k, v in m.items() if v is not None} for m in specs]
        if self.dtype != "auto":
            plain["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.runtime is not None:
            plain["runtime"] = self.runtime.model_dump()
        return plain

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Plain data with everything that affects a response: the key in LangChain's caches."""
        return {
            "model_name": self.model_name,
            "ensemble": self._ensemble.identity,
            "options": self._options,
            "round_detail": self.round_detail,
        }

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the model. If the model has an `engine`, the copy uses the same one."""
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine
        return super().__deepcopy__(memo)

    # A call -----------------------------------------------------------------------------------

    @cached_property
    def _ensemble(self) -> Ensemble:
        if self.engine is not None:
            return Ensemble(given=self.engine)
        return Ensemble.of(
            () if self.members == "embedded" else self.members or (),
            dtype=self.dtype,
            device_map=self.device_map,
            trust_remote_code=self.trust_remote_code,
            revision=self.revision,
            runtime=self.runtime or RuntimeConfig(),
        )

    @property
    def _chosen(self) -> tuple[str, ...] | None:
        return self._chosen_names(self._ensemble.names)

    def _chosen_names(self, known: Sequence[str] = ()) -> tuple[str, ...] | None:
        chosen = self.model if self.use is None else self.use
        if chosen is None:
            return None
        if isinstance(chosen, str):
            return (chosen,) if chosen in known else tuple(chosen.split("+"))
        return tuple(chosen)

    def _check_choice(self) -> None:
        """Check that `use` and `model` name members.

        Raises:
            InvalidOptionError: a name is unknown, or `use` and `model` differ.
        """
        if self.use is not None and self.model is not None and self.use != self.model:
            raise InvalidOptionError(
                f"use={self.use!r} and model={self.model!r} are the same option; pass only one"
            )
        known = self._ensemble.names
        option = "model" if self.use is None else "use"
        for name in self._chosen or ():
            if name not in known:
                raise InvalidOptionError(
                    f"{option}={getattr(self, option)!r}: there is no member {name!r}."
                    f"{nearest(name, known)} {option}= selects from the loaded members "
                    f"({', '.join(known)}). To load a model, add its folder or hub id to members=."
                )

    @property
    def _options(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in OPTIONS}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def _stops(self) -> list[str] | None:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def _for_call(self, stop: Sequence[str] | None, overrides: Mapping[str, Any]) -> Self:
        """Return a copy of the model with the overrides of a call.

        Raises:
            InvalidOptionError: a keyword is unknown, or its value cannot be used.
        """
        overrides = {name: value for name, value in overrides.items() if value is not None}
        update = check_option_names(overrides, extra=(*PER_CALL, *ACCEPTED))
        update = {name: value for name, value in update.items() if name not in ACCEPTED}
        if stop is not None:
            update["stop"] = [stop] if isinstance(stop, str) else list(stop)
        update = _with_plain_schema(update)
        if any(name in update for name in CONSTRAINTS):  # the call's value replaces all four
            update = {**dict.fromkeys(CONSTRAINTS), **update}
        if "use" in update or "model" in update:  # the call's value replaces both
            update = {"use": None, "model": None, **update}
        own = {name: update[name] for name in PER_CALL if name in update}
        update |= _CallOptions(**own).model_dump(exclude_unset=True)
        copy = self.model_copy(update=update)
        copy._check_choice()
        return copy

    def _loaded(self) -> AdaFuseEngine:
        return self._ensemble.engine()

    async def _aloaded(self) -> AdaFuseEngine:
        """Return the engine. Load it in a thread if necessary, to keep the event loop free."""
        if self._ensemble.is_loaded:
            return self._loaded()
        return await asyncio.to_thread(self._loaded)

    def _first_codec(self) -> TextCodec:
        backends = self._loaded().backends
        return next((b.codec for b in backends if b.name in self._names), backends[0].codec)

    def _decode(
        self, run: ModelRun | None, index: int | None = None, **prompt: Any
    ) -> Generator[tuple[StreamEvent, RoundRecords], None, None]:
        """Report the rounds of one decode. Yield each event with its round's records."""
        reporter, engine = self._reporter(run), self._loaded()
        with (
            self._deadline() as cancel,
            closing(engine.stream(**prompt, **self._decode_options(cancel))) as events,
        ):
            for event in events:
                self._check_timeout(event)
                yield event, reporter.report(event, **_prompt_field(index))

    async def _adecode(
        self, run: ModelRun | None, index: int | None = None, **prompt: Any
    ) -> AsyncGenerator[tuple[StreamEvent, RoundRecords], None]:
        """Do the same as `_decode`, without blocking the event loop."""
        reporter, engine = self._reporter(run), await self._aloaded()
        with self._deadline() as cancel:
            async with aclosing(engine.astream(**prompt, **self._decode_options(cancel))) as events:
                async for event in events:
                    self._check_timeout(event)
                    yield event, await reporter.areport(event, **_prompt_field(index))

    def _decode_all(
        self, run: ModelRun | None, prompts: Sequence[str]
    ) -> list[tuple[Generation, RoundRecords]]:
        """Decode prompts in shared forward passes. Each record contains its prompt's number."""
        reporter, engine = self._reporter(run), self._loaded()
        done: dict[int, Generation] = {}
        records: list[RoundRecords] = [[] for _ in prompts]
        with (
            self._deadline() as cancel,
            closing(engine.stream_batch(prompts, **self._decode_options(cancel))) as events,
        ):
            for index, event in events:
                self._check_timeout(event)
                records[index] += reporter.report(event, **_prompt_field(index))
                if event.generation is not None:
                    done[index] = event.generation
        return [(done[index], records[index]) for index in range(len(prompts))]

    async def _adecode_all(
        self, run: ModelRun | None, prompts: Sequence[str]
    ) -> list[tuple[Generation, RoundRecords]]:
        """Return what `_decode_all` returns, without blocking the event loop."""

        async def decode(index: int, prompt: str) -> tuple[Generation, RoundRecords]:
            records: RoundRecords = []
            last: Generation | None = None
            async with aclosing(self._adecode(run, index, prompt=prompt)) as events:
                async for event, new in events:
                    records += new
                    last = event.generation
            assert last is not None, "a decode ends with its generation or an error"
            return last, records

        tasks = [asyncio.ensure_future(decode(*item)) for item in enumerate(prompts)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def _reporter(self, run: ModelRun | None) -> RoundReporter:
        return RoundReporter(run, self.round_detail, self.trace_rounds)

    def _decode_options(self, cancel: threading.Event) -> dict[str, Any]:
        """Return the keyword arguments of a decode, except the prompt."""
        return {"cancel": cancel, **self._engine_options}

    @property
    def _engine_options(self) -> dict[str, Any]:
        """The decoding options, including the active members."""
        chosen = {} if self._chosen is None else {"use": self._chosen}
        return {**self._options, **chosen}

    @contextmanager
    def _deadline(self) -> Iterator[threading.Event]:
        """Yield a `threading.Event` that cancels a decode. It is set on timeout and on exit.

        Raises:
            ContextOverflowError: the prompt does not fit a member's context window.
        """
        cancel = threading.Event()
        timer = threading.Timer(self.timeout or 0, cancel.set)
        timer.daemon = True
        if self.timeout is not None:
            timer.start()
        try:
            yield cancel
        except ContextWindowError as error:
            raise ContextOverflowError(str(error)) from error
        finally:
            timer.cancel()
            cancel.set()

    def _check_timeout(self, event: StreamEvent) -> None:
        if event.generation is not None and event.generation.finish_reason == "cancelled":
            raise TimeoutError(
                f"the call was stopped, because it took longer than timeout={self.timeout} seconds"
            )

    def _metadata(self, generation: Generation) -> dict[str, Any]:
        """Return the metadata of a response, for its last chunk."""
        reason: str = generation.finish_reason
        usage = generation.usage.model_dump()
        summary = Summary.of(generation.rounds).model_dump(mode="json")
        return {
            **({} if self.round_detail == "none" else {SUMMARY_KEY: summary}),
            "finish_reason": FINISH_REASONS.get(reason, reason),
            "model_name": self.model_name,
            "usage_by_member": {
                member: {kind: counts[member] for kind, counts in usage.items()}
                for member in generation.usage.prompt_tokens
            },
        }


_PER_CALL_FIELDS = {name: EnsembleModel.model_fields[name] for name in PER_CALL}
_CallOptions: Any = create_model(
    "_CallOptions",
    __base__=Options,
    **cast("Any", {name: (field.annotation, field) for name, field in _PER_CALL_FIELDS.items()}),
)
"""The options in `PER_CALL` of one call, with the types and limits of the model's fields."""


def _with_plain_schema(options: dict[str, Any]) -> dict[str, Any]:
    """Replace the option `json_schema` by a dict, if it is set.

    Raises:
        InvalidOptionError: it is no JSON schema.
    """
    if (schema := options.get("json_schema")) is None:
        return options
    return {**options, "json_schema": AdaFuseConfig(json_schema=schema).json_schema}


def usage_of(generation: Generation) -> UsageMetadata:
    """Return the token counts of the first active member, in LangChain's form."""
    usage = generation.usage
    first = next(iter(usage.prompt_tokens))
    prompt, completion = usage.prompt_tokens[first], usage.completion_tokens[first]
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=completion,
        total_tokens=prompt + completion,
        input_token_details={"cache_read": usage.cached_tokens[first]},
    )


def output_of(model_name: str, usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return LangChain's ``llm_output``: the model's name and the total of token counts."""
    total = {kind: sum(usage.get(kind, 0) for usage in usages) for kind in TOKEN_KINDS}
    return {"model_name": model_name, "token_usage": total}


def _one_error(error: ValidationError, kind: type[EnsembleModel]) -> InvalidInputError:
    """Return the error of this package for the first problem that pydantic found."""
    cause = error.errors()[0].get("ctx", {}).get("error")
    if isinstance(cause, InvalidInputError):
        return cause
    return InvalidOptionError(explain(error, tuple(kind.model_fields)))


def _prompt_field(index: int | None) -> dict[str, int]:
    return {} if index is None else {"prompt": index}
