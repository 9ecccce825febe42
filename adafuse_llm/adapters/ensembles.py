"""Ensembles that are cheap to name and are loaded when they are first used, once per process."""

from __future__ import annotations

import json
import threading
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from adafuse_llm import __version__
from adafuse_llm.config import RuntimeConfig
from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import InvalidInputError, InvalidOptionError
from adafuse_llm.forks import after_fork
from adafuse_llm.loading.config_file import read_config
from adafuse_llm.loading.specs import MemberSpec, as_spec, member_names
from adafuse_llm.runtime.heap import trim_heap

if TYPE_CHECKING:
    from os import PathLike

    import torch


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Members by name, or an engine that is there already.

    Ensembles that say the same share one engine: making, copying or pickling one loads nothing,
    and configuring a model a hundred times loads its weights once.

    Args:
        members: folders, hub ids or `MemberSpec`; none for the members that ship with adafuse-llm.
        dtype, device_map, trust_remote_code, revision: as for `AdaFuseEngine.from_pretrained`.
        runtime: how requests are run.
        given: an engine to use instead; then nothing else is said.

    Raises:
        InvalidInputError: a member is not one, or two explicit names are the same.
    """

    members: tuple[MemberSpec, ...] = ()
    dtype: str | torch.dtype = "auto"
    device_map: str | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    given: AdaFuseEngine | None = None

    @classmethod
    def of(
        cls, members: Sequence[str | MemberSpec | dict[str, Any]] = (), **loading: Any
    ) -> Ensemble:
        """An ensemble of members said in any of the ways that users say them."""
        if isinstance(members, (str, dict, MemberSpec)):
            raise InvalidInputError(f"members must be a list; got one member: {members!r}")
        specs = tuple(MemberSpec(**m) if isinstance(m, dict) else as_spec(m) for m in members)
        member_names(specs)
        return cls(specs, **loading)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the members; tells them without loading."""
        if self.given is not None:
            return self.given.members
        return tuple(member_names(self.members or _embedded()))

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this ensemble from any other that may answer differently: JSON-safe. `runtime`
        is left out, as it changes no answer.
        """
        if self.given is not None:
            return {"members": list(self.given.members), "engine": _token(self.given)}
        if not self.members:
            return {"members": list(self.names), "embedded": __version__}
        said = {
            "members": [
                {f.name: getattr(spec, f.name) for f in fields(spec)} for spec in self.members
            ],
            "dtype": self.dtype,
            "device_map": self.device_map,
            "revision": self.revision,
        }
        return dict(json.loads(json.dumps(said, default=_plain)))

    @property
    def is_loaded(self) -> bool:
        """Whether an engine is there."""
        return self.given is not None or self._key in _LOADED.engines

    def engine(self) -> AdaFuseEngine:
        """The engine; loads the members if that has not been done.

        Raises:
            LoadError: a member cannot be loaded; the next call tries again.
        """
        if self.given is not None:
            return self.given
        key = self._key
        with _LOADED.lock_of(key):
            engine = _LOADED.engines.get(key)
            if engine is None or engine.closed:
                engine = _LOADED.engines[key] = self._load()
            return engine

    def unload(self) -> None:
        """End running requests and let go of the members, for every ensemble that says the same;
        the next use loads them again. An engine that was given is left to its owner.
        """
        if self.given is None:
            with _LOADED.lock_of(self._key):
                if (engine := _LOADED.engines.pop(self._key, None)) is not None:
                    engine.close()
                    del engine  # with its members, unless somebody else holds it
                    trim_heap()

    @property
    def _key(self) -> str:
        said = [self.identity, self.trust_remote_code, self.runtime.model_dump()]
        return json.dumps(said, sort_keys=True)

    def _load(self) -> AdaFuseEngine:
        return AdaFuseEngine.from_pretrained(
            self.members or _embedded(),
            runtime=self.runtime,
            dtype=self.dtype,
            device_map=self.device_map,
            trust_remote_code=self.trust_remote_code,
            revision=self.revision,
        )


def configured(path: str | PathLike[str]) -> dict[str, Any]:
    """What a configuration file says, as a framework's model takes it: members that decode, how
    they are loaded, and options. Members are absent where they are the embedded ones, all of them.

    Raises:
        InvalidInputError: there is no such file, or it says something that cannot be used.
    """
    said = read_config(path)
    if said.strategy != "adafuse":
        raise InvalidOptionError(
            f"configuration file {path}: strategy must be 'adafuse' here; got {said.strategy!r}. "
            "Pass engine=AdaFuseEngine.from_config(...), which takes any."
        )
    options = said.config.model_dump(include=set(said.options))
    chosen = options.pop("use", None)
    fields = {name: getattr(said, name) for name in ("dtype", "device_map", "revision")}
    if said.models or chosen:
        specs = tuple(map(as_spec, said.models)) or _embedded()
        named = dict(zip(member_names(specs), specs, strict=True))
        try:
            weights = said.config.member_weights(tuple(named))
        except InvalidOptionError as error:
            raise InvalidOptionError(f"configuration file {path}: {error}") from None
        fields["members"] = [replace(named[name], name=name) for name in weights]
        if chosen and "weights" in options:
            options["weights"] = weights
    return {**fields, **options}


class _Loaded:
    """The engines of this process by key, and a lock for each key while its members load."""

    def __init__(self) -> None:
        self.engines: dict[str, AdaFuseEngine] = {}
        after_fork(self._renew_locks)

    def _renew_locks(self) -> None:
        self._locks: dict[str, threading.Lock] = {}

    def lock_of(self, key: str) -> threading.Lock:
        """Return the lock of a key."""
        return self._locks.setdefault(key, threading.Lock())


_LOADED = _Loaded()
_TOKENS: weakref.WeakKeyDictionary[AdaFuseEngine, str] = weakref.WeakKeyDictionary()


def _token(engine: AdaFuseEngine) -> str:
    """A name for an engine that no other has, in this process or another."""
    return _TOKENS.setdefault(engine, uuid.uuid4().hex)


def _embedded() -> tuple[MemberSpec, ...]:
    from adafuse_llm.embedded import member_paths

    return tuple(MemberSpec(path=str(path)) for path in member_paths())


def _plain(value: Any) -> Any:
    """For JSON: a configuration object as the mapping it is saved as, anything else as text."""
    return value.to_dict() if hasattr(value, "to_dict") else str(value)
