"""The base classes of the LangChain models, with their fields, ensemble and decoding."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.load.serializable import Serializable
from pydantic import Field
from typing_extensions import Self

from adafuse_llm import AdaFuseConfig, Engine
from adafuse_llm.adapters.model import EnsembleFields
from adafuse_llm.adapters.options import ALIASES
from adafuse_llm.adapters.reply_form import FORM_KEYWORDS
from adafuse_llm.config import CONSTRAINTS
from adafuse_llm.errors import InvalidOptionError
from langchain_adafuse._calls import ModelCall, RoundDetail, langchains_error

MEMBERS_VARIABLE = "ADAFUSE_MEMBERS"
"""Environment variable with the default members, separated by commas."""


class EnsembleRunnable(EnsembleFields, Serializable):
    """The base class of this package's models: their engine, options of calls, and serialization.

    `model` is another name of `use`; it can be a text in which ``+`` joins the names of members.
    Every call can override the decoding options and `timeout`.
    """

    engine: Engine | None = None
    """An existing engine to use instead of `members`, such as a `RemoteEngine`."""

    timeout: float | None = Field(default=None, gt=0, le=threading.TIMEOUT_MAX, allow_inf_nan=False)
    """Time limit of a call in seconds, excluding loading. A longer call raises
    `RequestTimeoutError`."""

    _names_of_fields: ClassVar[Mapping[str, str]] = {**ALIASES, "model": "use"}
    _shared = ("engine",)
    _per_call: ClassVar[tuple[str, ...]] = ("timeout",)

    def __init__(self, **fields: Any) -> None:
        if fields.get("members") is None and fields.get("engine") is None:
            paths = os.environ.get(MEMBERS_VARIABLE, "").split(",")
            fields["members"] = [path.strip() for path in paths if path.strip()] or None
        super().__init__(**fields)
        self._config.check_n()
        _ = self._names  # checks the options

    @property
    def model_name(self) -> str:
        """Names of the active members, joined by ``+``."""
        return "+".join(self._names)

    def get_token_ids(self, text: str) -> list[int]:
        """Encode a text with the member that needs the most tokens. This loads the members."""
        return self._most_tokens(prompt=text)

    # Names and copies -------------------------------------------------------------------------

    if not TYPE_CHECKING:  # type checkers read LangChain's methods

        def bind(self, **kwargs: Any) -> Any:
            """Return a copy of the model with these options. Bind other keywords to the copy.

            LangChain's binding would lose options that are bound before `bind_tools`.
            """
            known = {*AdaFuseConfig.model_fields, *self._names_of_fields, *self._per_call}
            if "tools" in kwargs:  # the choice belongs to these tools
                known -= {*FORM_KEYWORDS}
            options = {name: kwargs[name] for name in kwargs if name in known}
            others = {name: kwargs[name] for name in kwargs if name not in known}
            model = self._for_call(None, options)
            return super(EnsembleRunnable, model).bind(**others) if others else model

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
        """All that affects a response, as plain data for the keys of LangChain's caches."""
        options = self._options
        if "stop" in options:  # LangChain writes a call's own `stop` under this name
            options["stop_sequences"] = options.pop("stop")
        return {
            "model_name": self.model_name,
            "ensemble": self._ensemble.identity,
            **options,
            **{name: getattr(self, name) for name in self._per_call if name != "timeout"},
        }

    # A call -----------------------------------------------------------------------------------

    @property  # type: ignore[misc]
    def _given_engine(self) -> Engine | None:
        return self.engine

    @langchains_error()
    def _for_call(self, stop: Sequence[str] | None, overrides: Mapping[str, Any]) -> Self:
        """Return a copy with the overrides of a call, or the model itself if there are none."""
        keywords = {name: value for name, value in overrides.items() if value is not None}
        if stop is not None:
            keywords["stop"] = stop
        if not keywords:
            return self
        update = self._checked(keywords, extra=self._per_call)
        if any(name in update for name in CONSTRAINTS):  # the call's value replaces all four
            update = {**dict.fromkeys(CONSTRAINTS), **update}
        return self.model_copy(update=update)

    def _most_tokens(self, **given: Any) -> list[int]:
        encoded = self._loaded().encode_prompt(use=self._names, weights=None, **given)
        return max(encoded.values(), key=len)

    @classmethod
    def _checked(cls, given: Mapping[str, Any], extra: tuple[str, ...]) -> dict[str, Any]:
        given = {**given}
        if (model := given.pop("model", None)) is not None:
            use = model.split("+") if isinstance(model, str) else model
            if given.setdefault("use", use) not in (use, model):
                raise InvalidOptionError(
                    f"use={given['use']!r} and model={model!r} are the same option; pass only one"
                )
        return super()._checked(given, extra)


class EnsembleModel(EnsembleRunnable):
    """The base class of `AdaFuseLLM` and `ChatAdaFuse`, which write text.

    Every call can also override `round_detail`.
    """

    streaming: bool | None = None
    round_detail: RoundDetail = "summary"
    """What messages contain about the rounds: ``"summary"`` for a summary, ``"full"`` to add a
    record of each round, or ``"none"``. Callbacks receive full records, except with ``"none"``."""

    _per_call: ClassVar[tuple[str, ...]] = (*EnsembleRunnable._per_call, "round_detail")

    def _generate(
        self, given: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        call = self._call(given, stop, kwargs)
        return self._result(call, call.generations(run_manager))

    async def _agenerate(
        self, given: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        call = self._call(given, stop, kwargs)
        return self._result(call, await call.agenerations(run_manager))

    def _stream(
        self, given: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[Any]:
        return self._call(given, stop, kwargs).chunks(run_manager)

    def _astream(
        self, given: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        return self._call(given, stop, kwargs).achunks(run_manager)

    @abstractmethod
    def _call(self, given: Any, stop: list[str] | None, keywords: Mapping[str, Any]) -> ModelCall:
        """Return a call for prompts or messages. The `keywords` override fields of the model."""

    @abstractmethod
    def _result(self, call: ModelCall, generations: list[Any]) -> Any:
        """Return the responses of a call as LangChain's result."""
