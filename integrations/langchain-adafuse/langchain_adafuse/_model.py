"""What the two models share: fields, the ensemble behind them, and how a call is decoded."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from langchain_core.exceptions import ContextOverflowError
from langchain_core.load.serializable import Serializable
from langchain_core.messages.ai import UsageMetadata
from pydantic import ConfigDict, Field, model_validator
from typing_extensions import Self, Unpack

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    ContextWindowError,
    Generation,
    RuntimeConfig,
    StreamEvent,
)
from adafuse_llm.adapters.ensembles import Ensemble, configured
from adafuse_llm.adapters.options import check_option_names
from adafuse_llm.config import DecodeOptions
from adafuse_llm.errors import InvalidInputError, InvalidOptionError, nearest
from adafuse_llm.summary import RoundDetail
from adafuse_llm.text.codec import TextCodec
from langchain_adafuse._rounds import ModelRun, RoundReporter

if TYPE_CHECKING:
    import torch
    from langchain_core.caches import BaseCache
    from langchain_core.callbacks import Callbacks
    from langchain_core.language_models.model_profile import ModelProfile
    from langchain_core.rate_limiters import BaseRateLimiter

    from adafuse_llm import MemberSpec

    Members = Sequence[str | MemberSpec | dict[str, Any]] | Literal["embedded"] | None
else:  # pydantic would have to know torch to take a MemberSpec apart
    Members = Any

OPTIONS = (*(name for name in AdaFuseConfig.model_fields if name != "use"), "temperature")
PER_CALL = ("use", "model", "temperature", "timeout", "max_retries", "round_detail", "trace_rounds")
MEMBERS_VARIABLE = "ADAFUSE_MEMBERS"
"""Environment variable with the members, separated by commas, of models that are given none."""

ACCEPTED = ("api_key", "stream")
"""What LangChain passes to every model, and what means nothing here."""

FINISH_REASONS = {"stop_sequence": "stop"}

Told = list[dict[str, Any]]


class ModelFields(DecodeOptions, total=False):
    """The keyword arguments of `AdaFuseLLM` and `ChatAdaFuse`, for type checkers."""

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
    """Fields of `AdaFuseLLM` and `ChatAdaFuse`. Making one loads nothing.

    Options of decoding that are None are the engine's (see `AdaFuseConfig`), and every call can
    override them, as well as `model`, `timeout`, `round_detail` and `trace_rounds`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    members: Members = None
    """Folders, hub ids or `MemberSpec`; ``"embedded"`` for the small ones that ship with
    adafuse-llm. Models with the same members share their weights."""
    engine: AdaFuseEngine | None = None
    """An engine that is there already, instead of `members`."""
    dtype: Any = "auto"
    """Dtype of the weights, such as ``"bfloat16"``."""
    device_map: str | None = None
    """``"auto"`` to divide the devices' memory among the members."""
    revision: str | None = None
    """Revision of hub models."""
    trust_remote_code: bool = False
    """Allow code that comes with a model to run."""
    runtime: RuntimeConfig | None = None
    """How requests are run."""

    use: str | list[str] | None = None
    """Names of the members that decode, among those of `members`. Default: all."""
    model: str | list[str] | None = None
    """LangChain's name for `use`; one text can hold several names, joined by ``+``."""
    margin_threshold: float | None = None
    max_words: int | None = None
    branching_factor: int | None = None
    max_word_tokens: int | None = None
    max_new_tokens: int | None = None
    """Also accepted as `max_tokens` and `max_completion_tokens`."""
    stop: list[str] | str | None = None
    weights: dict[str, float] | list[float] | None = None
    temperature: float | None = None
    """0, as decoding is deterministic."""

    timeout: float | None = Field(default=None, gt=0)
    """Seconds after which a call is stopped and raises `TimeoutError`; loading does not count."""
    max_retries: int | None = None
    """Accepted, and without effect: a decode that failed would fail again."""
    streaming: bool | None = None
    round_detail: RoundDetail = "full"
    """How much is told of every round, in events and on messages."""
    trace_rounds: bool = False
    """Make every round a child run, for tracers that show no custom events (LangSmith)."""

    if TYPE_CHECKING:

        def __init__(self, **fields: Unpack[ModelFields]) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, said: Any) -> Any:
        if not isinstance(said, Mapping):
            return said
        known = check_option_names(said, also=(*cls.model_fields, *ACCEPTED))
        known = {name: value for name, value in known.items() if name not in ACCEPTED}
        if known.get("engine") is None and not known.get("members"):
            named = os.environ.get(MEMBERS_VARIABLE, "").split(",")
            known["members"] = [each.strip() for each in named if each.strip()]
        return known

    @model_validator(mode="after")
    def _usable(self) -> Self:
        AdaFuseConfig().override({**self._options, "use": self._chosen_names()})
        if (self.engine is None) == (not self.members):
            if self.engine is None and (meant := self.use or self.model):
                paths = [meant] if isinstance(meant, str) else meant
                raise InvalidInputError(
                    f"model={meant!r} chooses among loaded members, and none are given. To load "
                    f"models, write members={paths!r}, with the folder or hub id of each"
                )
            raise InvalidInputError(
                "pass either members=[...] (folders or hub ids) or engine=...; "
                f"{type(self).__name__}.from_embedded() takes the small models that ship with "
                "adafuse-llm"
            )
        self._check_choice()
        return self

    @classmethod
    def from_embedded(cls, **fields: Unpack[ModelFields]) -> Self:
        """The three small models that ship with adafuse-llm."""
        given: dict[str, Any] = {**fields}
        return cls(members="embedded", **given)

    @classmethod
    def from_config(cls, path: str | os.PathLike[str], **fields: Unpack[ModelFields]) -> Self:
        """What a configuration file describes, such as one that ``adafuse tune`` wrote.

        Args:
            path: YAML or JSON; see `adafuse_llm.loading.config_file`.
            **fields: any other fields; they come before what the file says.

        Raises:
            InvalidInputError: there is no such file, or it says something that cannot be used.
        """
        return cls(**{"members": "embedded", **configured(path), **fields})

    def warmup(self) -> Self:
        """Load the members now instead of with the first call; returns the model."""
        self._loaded()
        return self

    def unload(self) -> None:
        """Let go of the members, for all models that have the same; the next call loads them
        again. An engine that was passed is left alone.
        """
        self._ensemble.unload()

    @property
    def model_name(self) -> str:
        """Names of the members that decode, joined by ``+``."""
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
        """`max_new_tokens`, under the name that LangChain uses."""
        return self.max_new_tokens

    def get_token_ids(self, text: str) -> list[int]:
        """Tokens of a text for the first member that decodes; loads the members."""
        return self._first_codec().encode_prompt(text)

    # Serialization ----------------------------------------------------------------------------

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @property
    def lc_attributes(self) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        if self._ensemble.members:
            said = self._ensemble.identity["members"]
            plain["members"] = [{k: v for k, v in m.items() if v is not None} for m in said]
        if self.dtype != "auto":
            plain["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.runtime is not None:
            plain["runtime"] = self.runtime.model_dump()
        return plain

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that decides an answer, in plain data: it is the key of caches."""
        return {
            "model_name": self.model_name,
            "ensemble": self._ensemble.identity,
            "options": self._options,
            "round_detail": self.round_detail,
        }

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares the engine it was given."""
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
        """Refuse names that are not those of members.

        Raises:
            InvalidOptionError: `use` or `model` names no member, or they differ.
        """
        if self.use is not None and self.model is not None and self.use != self.model:
            raise InvalidOptionError(
                f"use={self.use!r} and model={self.model!r} are the same option; leave one out"
            )
        known = self._ensemble.names
        option = "model" if self.use is None else "use"
        for name in self._chosen or ():
            if name not in known:
                raise InvalidOptionError(
                    f"{option}={getattr(self, option)!r}: there is no member {name!r}."
                    f"{nearest(name, known)} {option}= chooses among the loaded members "
                    f"({', '.join(known)}). To load a model, name its folder or hub id in members=."
                )

    @property
    def _options(self) -> dict[str, Any]:
        said = {name: getattr(self, name) for name in OPTIONS}
        return {name: value for name, value in said.items() if value is not None}

    @property
    def _stops(self) -> list[str] | None:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def _for_call(self, stop: Sequence[str] | None, said: Mapping[str, Any]) -> Self:
        """This model with what a call says.

        Raises:
            TypeError: a keyword is unknown.
        """
        said = {name: value for name, value in said.items() if value is not None}
        update = check_option_names(said, also=(*PER_CALL, *ACCEPTED))
        update = {name: value for name, value in update.items() if name not in ACCEPTED}
        if stop is not None:
            update["stop"] = [stop] if isinstance(stop, str) else list(stop)
        if "use" in update or "model" in update:  # a call's choice replaces the model's own
            update = {"use": None, "model": None, **update}
        if (detail := update.get("round_detail", "full")) not in get_args(RoundDetail):
            raise InvalidOptionError(
                f"option 'round_detail': one of {', '.join(get_args(RoundDetail))}; got {detail!r}"
            )
        copy = self.model_copy(update=update)
        copy._check_choice()
        return copy

    def _loaded(self) -> AdaFuseEngine:
        return self._ensemble.engine()

    async def _aloaded(self) -> AdaFuseEngine:
        """The engine, loaded on a thread so that the event loop goes on."""
        if self._ensemble.is_loaded:
            return self._loaded()
        return await asyncio.to_thread(self._loaded)

    def _first_codec(self) -> TextCodec:
        backends = self._loaded().backends
        return next((b.codec for b in backends if b.name in self._names), backends[0].codec)

    def _decode(
        self, run: ModelRun | None, index: int | None = None, **prompt: Any
    ) -> Generator[tuple[StreamEvent, Told], None, None]:
        """The events of one decode, each with the record of its round, which has been told."""
        teller, engine = self._teller(run), self._loaded()
        with (
            self._deadline() as cancel,
            closing(engine.stream(**prompt, **self._said(cancel))) as events,
        ):
            for event in events:
                self._check_in_time(event)
                yield event, teller.tell(event, **_numbered(index))

    async def _adecode(
        self, run: ModelRun | None, index: int | None = None, **prompt: Any
    ) -> AsyncGenerator[tuple[StreamEvent, Told], None]:
        """`_decode` on an event loop."""
        teller, engine = self._teller(run), await self._aloaded()
        with self._deadline() as cancel:
            async with aclosing(engine.astream(**prompt, **self._said(cancel))) as events:
                async for event in events:
                    self._check_in_time(event)
                    yield event, await teller.atell(event, **_numbered(index))

    def _decode_all(
        self, run: ModelRun | None, prompts: Sequence[str]
    ) -> list[tuple[Generation, Told]]:
        """Decode prompts in shared passes; records carry the number of their prompt."""
        teller, engine = self._teller(run), self._loaded()
        done: dict[int, Generation] = {}
        told: list[Told] = [[] for _ in prompts]
        with (
            self._deadline() as cancel,
            closing(engine.stream_batch(prompts, **self._said(cancel))) as events,
        ):
            for index, event in events:
                self._check_in_time(event)
                told[index] += teller.tell(event, **_numbered(index))
                if event.generation is not None:
                    done[index] = event.generation
        return [(done[index], told[index]) for index in range(len(prompts))]

    async def _adecode_all(
        self, run: ModelRun | None, prompts: Sequence[str]
    ) -> list[tuple[Generation, Told]]:
        """`_decode_all` on an event loop."""

        async def decode(index: int, prompt: str) -> tuple[Generation, Told]:
            told: Told = []
            last: Generation | None = None
            async with aclosing(self._adecode(run, index, prompt=prompt)) as events:
                async for event, its in events:
                    told += its
                    last = event.generation
            assert last is not None, "a decode ends with its generation or an error"
            return last, told

        tasks = [asyncio.ensure_future(decode(*numbered)) for numbered in enumerate(prompts)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def _teller(self, run: ModelRun | None) -> RoundReporter:
        return RoundReporter(run, self.round_detail, self.trace_rounds)

    def _said(self, cancel: threading.Event) -> dict[str, Any]:
        """What a decode is told besides its prompt."""
        chosen = {} if self._chosen is None else {"use": self._chosen}
        return {"cancel": cancel, **self._options, **chosen}

    @contextmanager
    def _deadline(self) -> Iterator[threading.Event]:
        """The event that ends a decode, set when time is up and when nobody waits any more.

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

    def _check_in_time(self, event: StreamEvent) -> None:
        if event.generation is not None and event.generation.finish_reason == "cancelled":
            raise TimeoutError(f"stopped: no answer within timeout={self.timeout} seconds")

    def _metadata(self, generation: Generation) -> dict[str, Any]:
        """What is said of an answer once, with its end."""
        reason: str = generation.finish_reason
        usage = generation.usage.model_dump()
        return {
            "finish_reason": FINISH_REASONS.get(reason, reason),
            "model_name": self.model_name,
            "usage_by_member": {
                member: {kind: counts[member] for kind, counts in usage.items()}
                for member in generation.usage.prompt_tokens
            },
        }


def usage_of(generation: Generation) -> UsageMetadata:
    """Tokens as LangChain counts them: those of the first member that decoded."""
    usage = generation.usage
    first = next(iter(usage.prompt_tokens))
    read, written = usage.prompt_tokens[first], usage.completion_tokens[first]
    return UsageMetadata(
        input_tokens=read,
        output_tokens=written,
        total_tokens=read + written,
        input_token_details={"cache_read": usage.cached_tokens[first]},
    )


def _numbered(index: int | None) -> dict[str, int]:
    return {} if index is None else {"prompt": index}
