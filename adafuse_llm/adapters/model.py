"""What the models of all frameworks share: their fields, their members, and warnings."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict, ValidationError
from typing_extensions import Self

from adafuse_llm.adapters.ensembles import Ensemble, fields_from_config
from adafuse_llm.adapters.options import ALIASES, USE_SERVER, OptionFields, check_option_names
from adafuse_llm.config import AdaFuseConfig, RuntimeConfig, explain
from adafuse_llm.decisions import DecideOptions
from adafuse_llm.errors import InvalidInputError, InvalidOptionError
from adafuse_llm.interface import Engine
from adafuse_llm.strategies.registry import AUTO

LOADING = ("dtype", "device_map", "revision", "trust_remote_code", "runtime", "strategy")
"""Fields that become keywords of the `Ensemble`."""


class EnsembleFields(OptionFields):
    """A mixin with the fields and methods that the models of all frameworks share.

    Creating a model loads nothing: the members load on first use. Models that load the same members
    share the weights. If a decoding option is None, the engine's value applies (`AdaFuseConfig`).

    Raises:
        InvalidInputError: both `members` and `engine` are given, or neither, or one of them cannot
            be used.
        InvalidOptionError: a keyword is unknown, or its value cannot be used.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, validate_assignment=True)

    members: Any = None
    """Folders, GGUF files, hub ids, addresses of servers, or mappings with the settings of
    members; or ``"embedded"`` for the small models that ship with adafuse-llm."""
    dtype: Any = "auto"
    """Dtype of the weights, such as ``"bfloat16"``."""
    device_map: str | None = None
    """Devices for the weights, such as ``"auto"`` or ``"cuda:0"``."""
    revision: str | None = None
    """Revision of hub models."""
    trust_remote_code: bool = False
    """Whether to run code from model repositories."""
    runtime: RuntimeConfig | None = None
    """Settings of the engine's scheduler and caches."""
    strategy: str = AUTO
    """Name of the strategy that chooses the next piece of text, such as ``"single"``. Models that
    differ only in the strategy share their weights. An `engine` has a strategy of its own, so do
    not set both."""

    _names_of_fields: ClassVar[Mapping[str, str]] = ALIASES
    """Names of fields, by their other names, such as ``max_tokens``."""

    _shared: ClassVar[tuple[str, ...]]
    """Attributes that a deep copy shares with its original."""
    _given_engine: Any
    """The engine that the user passed instead of members."""

    def __init__(self, **fields: Any) -> None:
        engine, members = fields.get("engine"), fields.get("members")
        if engine is not None and not isinstance(engine, Engine):
            raise InvalidInputError(
                f"engine must be an AdaFuseEngine or a RemoteEngine; got {type(engine).__name__}: "
                f"{USE_SERVER}"
            )
        kinds = type(self).model_fields
        checked = self._checked(fields, extra=(*kinds, "engine"))
        if (engine is None) == (members is None):
            raise InvalidInputError(
                "pass either members=[...] (GGUF files, folders or hub ids to load) or engine=...; "
                f"use= only selects among loaded members. {type(self).__name__}.from_embedded() "
                "uses the small models that ship with adafuse-llm"
            )
        names = [name for name in LOADING if checked.get(name) not in (None, kinds[name].default)]
        if engine is not None and (useless := [name for name in names if name != "strategy"]):
            raise InvalidInputError(
                f"engine= cannot be combined with {', '.join(useless)}, because the engine is "
                "already loaded; pass these options when you create the engine"
            )
        if isinstance(members, Iterator):
            checked["members"] = list(members)
        try:
            super().__init__(**checked)
        except ValidationError as error:
            raise InvalidOptionError(explain(error, tuple(kinds))) from None

    @classmethod
    def from_embedded(cls, **fields: Any) -> Self:
        """Create a model from the three small members that ship with adafuse-llm."""
        return cls(**{"members": "embedded", **fields})

    @classmethod
    def from_config(cls, path: str | PathLike[str], **fields: Any) -> Self:
        """Create a model from a configuration file, such as one that ``adafuse tune`` has written.

        `fields` override the file. If the file names no members, the model has the embedded ones.

        Raises:
            InvalidInputError: the file cannot be read, or has unknown or invalid content.
        """
        return cls(**{"members": "embedded", **fields_from_config(path), **fields})

    def warmup(self) -> Self:
        """Load the members now instead of on the first call; return the model."""
        self._loaded()
        return self

    def unload(self) -> None:
        """Release the members, also for models that share them. A passed engine stays open."""
        self._ensemble.unload()

    @cached_property
    def _ensemble(self) -> Ensemble:
        loading = {name: getattr(self, name) for name in LOADING}
        return Ensemble(self.members, self._given_engine, **loading)

    @property
    def _config(self) -> AdaFuseConfig:
        return self._ensemble.config.override(self._options)

    @property
    def _names(self) -> tuple[str, ...]:
        """Names of the active members. Reading them checks the options, but loads nothing."""
        return tuple(self._config.member_weights(self._ensemble.names))

    @property
    def _options(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in AdaFuseConfig.model_fields}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def _decide_options(self) -> dict[str, Any]:
        """The options for `Engine.decide`, without `weights` if they would disable `decisions`."""
        options = self._options
        useless = ("weights",) if "decisions" in options else ()
        known = DecideOptions.__annotations__.keys() - {*useless}
        return {name: value for name, value in options.items() if name in known}

    def _loaded(self) -> Engine:
        return self._ensemble.engine()

    @classmethod
    def _checked(cls, given: Mapping[str, Any], extra: tuple[str, ...]) -> dict[str, Any]:
        """Check keywords, and return them under the names of the fields."""
        checked = check_option_names(given, extra=extra)
        options = {name: checked[name] for name in AdaFuseConfig.model_fields if name in checked}
        config = AdaFuseConfig(**options)
        set_ones = (name for name, value in options.items() if value is not None)
        return checked | {name: getattr(config, name) for name in set_ones}

    def __setattr__(self, name: str, value: Any) -> None:
        name = self._names_of_fields.get(name, name)
        if name in AdaFuseConfig.model_fields and value is not None:
            value = getattr(AdaFuseConfig().override({name: value}), name)
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise InvalidOptionError(explain(error, (name,))) from None
        if name in ("members", "engine", *LOADING):
            self.__dict__.pop("_ensemble", None)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy that has the fields in `update`. New members load on first use."""
        checked = self._checked(update or {}, extra=tuple(type(self).model_fields))
        copied = super().model_copy(deep=deep)
        for name, value in checked.items():
            setattr(copied, name, value)
        return copied

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        for name in self._shared:
            memo[id(getattr(self, name))] = getattr(self, name)
        return super().__deepcopy__(memo)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            field = type(self)._names_of_fields.get(name)
            return super().__getattr__(name) if field is None else getattr(self, field)

    def _warn_once(self, message: str) -> None:
        warn_once(type(self).__module__, message)


@lru_cache(1000)
def warn_once(logger: str, message: str) -> None:
    """Log a warning, unless this process has already logged the same one."""
    logging.getLogger(logger).warning("%s", message)
