"""The fields, members and options of the LlamaIndex LLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from llama_index.core.base.llms.types import ChatMessage, LLMMetadata
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_serializer
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.types import PydanticProgramMode
from typing_extensions import Self, Unpack

from adafuse_llm import (
    AdaFuseConfig,
    Engine,
    InvalidInputError,
    MemberSpec,
    RuntimeConfig,
)
from adafuse_llm.adapters.ensembles import Ensemble, check_engine, fields_from_config
from adafuse_llm.adapters.options import OptionFields, check_option_names
from adafuse_llm.adapters.reply_form import Enforce
from adafuse_llm.config import CONSTRAINTS, DecodeOptions
from adafuse_llm.strategies.registry import AUTO

if TYPE_CHECKING:
    import torch
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.rate_limiter import BaseRateLimiter
    from llama_index.core.types import BaseOutputParser

logger = logging.getLogger(__name__)

T = TypeVar("T")
Members = Iterable[str | MemberSpec | dict[str, Any]] | Literal["embedded"] | None

_LOADING = ("dtype", "device_map", "revision", "trust_remote_code", "runtime", "strategy")


class LLMOptions(DecodeOptions, total=False):
    """The keyword arguments of `AdaFuseLLM`, for type checkers."""

    dtype: str | torch.dtype
    device_map: str | None
    revision: str | None
    trust_remote_code: bool
    runtime: RuntimeConfig
    strategy: str
    context_window: int | None
    is_chat_model: bool | None
    emit_events: bool
    enforce: Enforce
    complete_as_chat: bool | None
    react_stop: bool
    max_tokens: int | None
    max_completion_tokens: int | None
    num_predict: int | None
    num_return_sequences: int | None
    stop_sequences: str | Sequence[str] | None
    system_prompt: str | None
    messages_to_prompt: Callable[[Sequence[ChatMessage]], str] | None
    completion_to_prompt: Callable[[str], str] | None
    query_wrapper_prompt: BasePromptTemplate | str | None
    callback_manager: CallbackManager
    output_parser: BaseOutputParser | None
    pydantic_program_mode: PydanticProgramMode | str
    rate_limiter: BaseRateLimiter | None


class EnsembleLLM(CustomLLM, FunctionCallingLLM, OptionFields):
    """The base class of `AdaFuseLLM`, which describes its fields."""

    model_config = ConfigDict(validate_assignment=True)

    members: tuple[Any, ...] | Literal["embedded"] | None = None
    dtype: Any = "auto"
    device_map: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    strategy: str = AUTO
    context_window: int | None = Field(default=None, ge=1)
    is_chat_model: bool | None = None
    emit_events: bool = True
    enforce: Enforce = "auto"
    complete_as_chat: bool | None = None
    react_stop: bool = True

    _passed_engine: Engine | None = PrivateAttr(default=None)
    _warnings: set[str] = PrivateAttr(default_factory=set)

    def __init__(
        self,
        members: Members = None,
        *,
        engine: Engine | None = None,
        **kwargs: Unpack[LLMOptions],
    ) -> None:
        fields = {*type(self).model_fields} - {*AdaFuseConfig.model_fields}
        given: dict[str, Any] = {**kwargs}
        base = {key: given.pop(key) for key in fields & {*given}}
        options = check_option_names(given, extra=sorted(fields))
        config = AdaFuseConfig(**options)
        check_engine(engine)
        if (members is None) == (engine is None):
            raise InvalidInputError(
                "pass either members=[...] (folders, GGUF files or hub ids) or engine=...; "
                "AdaFuseLLM.from_embedded() uses the small models that ship with adafuse-llm"
            )
        if engine is not None and (loading := [key for key in _LOADING if key in base]):
            raise InvalidInputError(
                f"engine= cannot be combined with {', '.join(loading)}, because the engine is "
                "already loaded; pass these options when you create the engine"
            )
        if members is None:
            ensemble = Ensemble(given=engine)
        else:
            ensemble = Ensemble.of(members, strategy=base.get("strategy", AUTO))
        if isinstance(base.get("query_wrapper_prompt"), str):
            base["query_wrapper_prompt"] = PromptTemplate(base["query_wrapper_prompt"])
        values = {name: getattr(config, name) for name in options}
        values.setdefault("temperature", (engine.config if engine else config).temperature)
        super().__init__(
            members=None if members is None else ensemble.members or "embedded",
            **{key: value for key, value in base.items() if value is not None},
            **values,
        )
        self._passed_engine = engine

    @classmethod
    def from_embedded(cls, **kwargs: Unpack[LLMOptions]) -> Self:
        """Create an LLM from the three small members that ship with adafuse-llm."""
        return cls(members="embedded", **kwargs)

    @classmethod
    def from_config(cls, path: str | PathLike[str], **kwargs: Unpack[LLMOptions]) -> Self:
        """Create an LLM from a configuration file, such as one written by ``adafuse tune``.

        Args:
            path: a YAML or JSON file; see `adafuse_llm.loading.config_file`.
            **kwargs: arguments of the constructor, which override the file.

        Raises:
            InvalidInputError: the file cannot be read, or has unknown or invalid content.
        """
        return cls(**{"members": "embedded", **fields_from_config(path), **kwargs})

    @classmethod
    def class_name(cls) -> str:
        return "AdaFuseLLM"

    @property
    def engine(self) -> Engine:
        """The engine. The first access loads the members.

        Raises:
            LoadError: a member cannot be loaded.
        """
        return self._ensemble.engine()

    def warmup(self) -> Self:
        """Load the members now instead of on the first call; return the LLM."""
        self._ensemble.engine()
        return self

    def unload(self) -> None:
        """Release the members. The next call loads them again.

        This affects all LLMs that share the members. An engine passed as `engine` stays open.
        """
        self._ensemble.unload()

    @property
    def metadata(self) -> LLMMetadata:
        """Context window, output limit and abilities.

        They are read from the members' files. Reading them loads the members only if one of these
        files is not on this machine or does not tell.

        ``is_chat_model`` is true if at least one active member has a chat template. The other
        members then read messages as plain text. ``is_function_calling_model`` is true if the LLM
        is a chat model, and well-formed tool calls can be enforced. LlamaIndex then uses function
        agents and programs that call functions.
        """
        config = self._config(self._options({}))
        names = tuple(config.member_weights(self._ensemble.names))
        is_chat = self.is_chat_model
        if is_chat is None:
            is_chat = bool(self._told(lambda ensemble: ensemble.is_chat_model(names)))
        return LLMMetadata(
            context_window=self.context_window
            or self._told(lambda ensemble: ensemble.context_window(names))
            or LLMMetadata().context_window,
            num_output=config.max_new_tokens,
            is_chat_model=is_chat,
            is_function_calling_model=is_chat
            and self.enforce is not False
            and self._ensemble.can_enforce(),
            model_name=self._model_name,
        )

    @property
    def max_tokens(self) -> int:
        """Another name of `max_new_tokens`. If that is not set, this is the engine's value."""
        return self._config(self._options({})).max_new_tokens

    @max_tokens.setter
    def max_tokens(self, value: int | None) -> None:
        self.max_new_tokens = value

    def to_payload(self) -> dict[str, Any]:
        if self._ensemble.is_loaded:
            return super().to_payload()
        return {"class_name": self.class_name(), "model_name": self._model_name}

    # Copies and pickles -----------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        for shared in (self._passed_engine, self.callback_manager, self.rate_limiter):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in AdaFuseConfig.model_fields and value is not None:
            value = getattr(AdaFuseConfig().override({name: value}), name)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        if self._passed_engine is not None:
            raise TypeError(
                "an LLM with a passed engine cannot be pickled, because pickles contain no "
                "weights; create the LLM with members=[...], which the other process can load"
            )
        return super().__getstate__()

    @field_serializer("members")
    def _serialize_members(self, members: Members) -> Any:
        return self._ensemble.identity["members"] if isinstance(members, tuple) else members

    @field_serializer("dtype")
    def _serialize_dtype(self, dtype: Any) -> str:
        return str(dtype)

    # ------------------------------------------------------------------------------------------

    @property
    def _ensemble(self) -> Ensemble:
        if self._passed_engine is not None:
            return Ensemble(given=self._passed_engine)
        return Ensemble.of(self.members or (), **{key: getattr(self, key) for key in _LOADING})

    @property
    def _model_name(self) -> str:
        return "+".join(self.use or self._ensemble.names)

    def _options(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call: those of the LLM, updated with the call's overrides."""
        fields = {name: getattr(self, name, None) for name in AdaFuseConfig.model_fields}
        options = {name: value for name, value in fields.items() if value is not None}
        given = check_option_names(overrides)
        if any(given.get(name) is not None for name in CONSTRAINTS):
            options = without_constraints(options)  # a constraint replaces all others
        return {**options, **given}

    def _config(self, options: Mapping[str, Any]) -> AdaFuseConfig:
        """Return the engine's options, overridden by `options`. This loads nothing."""
        config = self.engine.config if self._ensemble.is_loaded else AdaFuseConfig()
        return config.override(options)

    def _told(self, read: Callable[[Ensemble], T | None]) -> T | None:
        """Read a property of the ensemble. Load the members if their files do not tell."""
        value = read(self._ensemble)
        if value is None and not self._ensemble.is_loaded:
            self._ensemble.engine()
            value = read(self._ensemble)
        return value

    def _active_members(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the members that decode with these options.

        Raises:
            InvalidOptionError: an option is out of range or does not match the members.
        """
        engine = self.engine
        return tuple(engine.config.override(options).member_weights(engine.members))

    def _warn_once(self, message: str) -> None:
        """Log a warning, unless this LLM already logged the same one."""
        if message not in self._warnings:
            self._warnings.add(message)
            logger.warning(message)

    async def _aload(self) -> None:
        """Load the members without blocking the event loop."""
        ensemble = self._ensemble
        if not ensemble.is_loaded:
            await asyncio.to_thread(ensemble.engine)


def without_constraints(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without those that determine the form of a response."""
    return {name: value for name, value in options.items() if name not in CONSTRAINTS}
