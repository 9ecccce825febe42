"""Ensembles that load on first use. A process loads equal ensembles only once."""

from __future__ import annotations

import json
import threading
import uuid
import weakref
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from adafuse_llm import __version__
from adafuse_llm.backends.file_facts import file_has_template, file_window
from adafuse_llm.config import GRAMMARS, AdaFuseConfig, RuntimeConfig
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import InvalidOptionError
from adafuse_llm.grammar.matchers import is_available
from adafuse_llm.interface import Engine
from adafuse_llm.loading.config_file import read_config
from adafuse_llm.loading.specs import GGUFMember, MemberSpec, ServerMember, as_specs, member_names
from adafuse_llm.results import smallest_window
from adafuse_llm.strategies.registry import AUTO, find_strategy

if TYPE_CHECKING:
    from os import PathLike


class Ensemble:
    """An ensemble whose members load on first use, or an existing engine.

    Ensembles that differ only in `strategy` share the loaded members.

    Args:
        members: what to load; ``"embedded"`` for the members that ship with adafuse-llm.
        existing: an existing engine to use instead of `members`.
        strategy: name of the strategy that decodes.
        loading: other keywords of `AdaFuseEngine.from_pretrained`.

    Raises:
        InvalidInputError: `members` is empty or not a list of members, or names are not unique.
        InvalidOptionError: a setting of a member is unknown or out of range, the strategy is
            unknown, or both an engine and a strategy are given.
    """

    def __init__(
        self,
        members: Iterable[str | MemberSpec | dict[str, Any]] | Literal["embedded"] | None,
        existing: Engine | None = None,
        *,
        strategy: str = AUTO,
        **loading: Any,
    ) -> None:
        if existing is not None and strategy != AUTO:
            raise InvalidOptionError(
                "engine= and strategy= cannot be combined. Pass "
                f"engine=engine.with_strategy({strategy!r})"
            )
        find_strategy(strategy)
        self.existing, self.strategy, self.loading = existing, strategy, loading
        self.members: tuple[MemberSpec, ...] = ()  # empty for the embedded ones
        if existing is None and members != "embedded":
            self.members = as_specs(members, loading.get("revision"))
            member_names(self.members)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the members. Reading them loads nothing."""
        if self.existing is not None:
            return self.existing.members
        return tuple(member_names(self._specs))

    @property
    def identity(self) -> dict[str, Any]:
        """Plain data for keys of caches: members, loading and strategy, or an engine's token."""
        if self.existing is not None:
            token = _ENGINE_TOKENS.setdefault(self.existing, uuid.uuid4().hex)
            return {"members": list(self.existing.members), "engine": token}
        return {**self._loading, "strategy": self.strategy}

    @cached_property
    def _loading(self) -> dict[str, Any]:
        description: dict[str, Any] = {"members": [dict(spec) for spec in self.members]}
        if not self.members:
            description = {"members": self.names, "embedded": __version__}
        description |= {
            name: self.loading.get(name) for name in ("dtype", "device_map", "revision")
        }
        return dict(json.loads(json.dumps(description, default=_to_plain)))

    @property
    def is_loaded(self) -> bool:
        """Whether the members are loaded."""
        return self._open is not None

    @property
    def _open(self) -> Engine | None:
        if self.existing is not None:
            return self.existing
        engine = _LOADED.get(self._key)
        return None if engine is None or engine.closed else engine

    @property
    def config(self) -> AdaFuseConfig:
        """The options of the engine; until the members are loaded, the default options."""
        engine = self._open
        return AdaFuseConfig() if engine is None else engine.config

    def context_window(self, names: Collection[str]) -> int | None:
        """Return the smallest context window, in tokens, of the members in `names`. Loads nothing.

        None if no member has a limit, or if only loading can show a member's limit.
        """
        if (engine := self._open) is not None:
            return smallest_window(engine.member_info, names)
        windows = []
        for spec, place in self._chosen(names):
            windows.append(file_window(*place) or 0)
            if isinstance(spec, GGUFMember) and spec.context is not None:
                windows.append(spec.context)
        return min(windows, default=0) or None

    def is_chat_model(self, names: Collection[str]) -> bool | None:
        """Return whether at least one member in `names` has a chat template. Loads nothing.

        None if only loading can show it.
        """
        if (engine := self._open) is not None:
            return any(info.has_chat_template for info in engine.member_info if info.name in names)
        known = [file_has_template(*place) for _, place in self._chosen(names)]
        if True in known:
            return True
        return None if None in known else False

    def can_enforce(self) -> bool:
        """Return whether the members and the strategy can follow a grammar. This loads nothing.

        A grammar needs the bytes of all tokens. Before loading, only servers count as lacking them.
        """
        if self.is_loaded:
            return self.engine().can_enforce
        follows = find_strategy(self.strategy).options.issuperset(GRAMMARS)
        on_servers = any(isinstance(spec, ServerMember) for spec in self.members)
        return is_available() and follows and not on_servers

    def engine(self) -> Engine:
        """Return the engine. The first call loads the members."""
        if self.existing is not None:
            return self.existing
        key = self._key
        with _LOCKS.setdefault(key, threading.Lock()):
            engine = _LOADED.get(key)
            if engine is None or engine.closed:
                engine = AdaFuseEngine.from_pretrained(self._specs, **self.loading)
                _LOADED[key] = engine
        return engine if self.strategy == AUTO else engine.with_strategy(self.strategy)

    def unload(self) -> None:
        """Release the members for all ensembles that share them. An existing engine stays open."""
        if self.existing is None and (engine := _LOADED.pop(self._key, None)) is not None:
            engine.close()

    @cached_property
    def _specs(self) -> tuple[MemberSpec, ...]:
        from adafuse_llm.embedded import member_paths

        return self.members or as_specs(member_paths())

    def _chosen(self, names: Collection[str]) -> list[tuple[MemberSpec, tuple[Any, Any, Any]]]:
        revision = self.loading.get("revision")
        return [
            (spec, (spec.path, spec.revision or revision, getattr(spec, "file", None)))
            for name, spec in zip(self.names, self._specs, strict=True)
            if name in names
        ]

    @cached_property
    def _key(self) -> str:
        runtime = self.loading.get("runtime") or RuntimeConfig()
        parts = [self._loading, self.loading.get("trust_remote_code"), runtime.model_dump()]
        return json.dumps(parts, sort_keys=True)


def fields_from_config(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a configuration file. Return its content as fields of a framework's model.

    If the file has `models` or `use`, the field ``"members"`` lists the active members.

    Raises:
        InvalidInputError: the file cannot be read, or has unknown or invalid content.
    """
    file = read_config(path)
    options = file.config.model_dump(include=set(file.options))
    used = options.pop("use", None)
    fields = file.loading
    if file.runtime.model_fields_set:
        fields["runtime"] = file.runtime
    if file.models or used:
        specs = file.members
        by_name = dict(zip(member_names(specs), specs, strict=True))
        try:
            weights = file.config.member_weights(tuple(by_name))
        except InvalidOptionError as error:
            raise InvalidOptionError(f"configuration file {path}: {error}") from None
        fields["members"] = [by_name[name].model_copy(update={"name": name}) for name in weights]
        if used and "weights" in options:
            options["weights"] = weights
    return {**fields, **options}


_LOADED: dict[str, AdaFuseEngine] = {}
"""The loaded engines of this process, by the `_key` of their ensembles."""

_LOCKS: dict[str, threading.Lock] = {}
"""Locks by the `_key` of their ensembles. A thread that loads an ensemble holds its lock."""

_ENGINE_TOKENS: weakref.WeakKeyDictionary[Engine, str] = weakref.WeakKeyDictionary()


def _to_plain(value: Any) -> Any:
    return value.to_dict() if hasattr(value, "to_dict") else str(value)
