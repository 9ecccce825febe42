"""What the models of all frameworks share: their fields, their members, and warnings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property, lru_cache
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

from adafuse_llm.adapters.ensembles import Ensemble, fields_from_config
from adafuse_llm.adapters.options import ALIASES, OptionFields
from adafuse_llm.config import AdaFuseConfig, RuntimeConfig
from adafuse_llm.interface import Engine
from adafuse_llm.strategies.registry import AUTO

LOADING = ("dtype", "device_map", "revision", "trust_remote_code", "runtime", "strategy")
"""Fields that say how members are loaded."""

MAX_WARNINGS = 1000
"""Number of warnings that are remembered, so that they are not repeated."""


class EnsembleFields(OptionFields):
    """A mixin with the fields and methods of a framework's model. Creating a model loads nothing.

    The members load on first use. Models with the same members share their weights. If a decoding
    option is None, the engine's value applies (see `AdaFuseConfig`).
    """

    members: Any = None
    """Folders, GGUF files, hub ids, addresses of servers, or mappings of the settings of
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
    differ only in it share their weights. With `engine`, the engine has the strategy."""

    _names_of_fields: ClassVar[Mapping[str, str]] = ALIASES
    """Other names of fields."""

    @classmethod
    def from_embedded(cls, **fields: Any) -> Self:
        """Create a model from the three small members that ship with adafuse-llm."""
        return cls(**{"members": "embedded", **fields})

    @classmethod
    def from_config(cls, path: str | PathLike[str], **fields: Any) -> Self:
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
        self._ensemble.engine()
        return self

    def unload(self) -> None:
        """Release the members, also for other models. The next call loads them again.

        An engine passed as `engine` stays open.
        """
        self._ensemble.unload()

    @property
    def _given_engine(self) -> Engine | None:
        """The engine that the user passed instead of members."""
        raise NotImplementedError

    @cached_property
    def _ensemble(self) -> Ensemble:
        loading = {name: getattr(self, name) for name in LOADING}
        loading["runtime"] = self.runtime or RuntimeConfig()
        return Ensemble.of(self.members or (), self._given_engine, **loading)

    @property
    def _options(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in AdaFuseConfig.model_fields}
        return {name: value for name, value in options.items() if value is not None}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(self._names_of_fields.get(name, name), value)
        if name in ("members", "engine", *LOADING):
            self.__dict__.pop("_ensemble", None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the value of a field under another name."""
            field = type(self)._names_of_fields.get(name)
            return super().__getattr__(name) if field is None else getattr(self, field)

    def _warn_once(self, message: str) -> None:
        warn_once(type(self).__module__, message)


@lru_cache(MAX_WARNINGS)
def warn_once(logger: str, message: str) -> None:
    """Log a warning, unless this process has already logged the same one."""
    logging.getLogger(logger).warning("%s", message)
