"""Load members of all kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from adafuse_llm.backends.base import Backend
from adafuse_llm.errors import InvalidInputError, short_repr
from adafuse_llm.loading.gguf import find_gguf, is_gguf_member, load_gguf
from adafuse_llm.loading.huggingface import load_huggingface
from adafuse_llm.loading.specs import MemberSpec, as_spec, check_kind, member_names

if TYPE_CHECKING:
    import torch


def load_members(
    members: Sequence[str | MemberSpec],
    *,
    dtype: str | torch.dtype = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> tuple[list[Backend], dict[str, float] | None]:
    """Load members in order.

    All files are found and checked before any weights are loaded. `dtype`, `device_map` and
    `trust_remote_code` do not apply to GGUF members.

    Returns:
        The members; and their weights by name, or None if all weights are 1.

    Raises:
        LoadError: a member cannot be loaded.
        UnsupportedModelError: a model cannot be a member of an ensemble.
        InvalidInputError: `members` is empty, or two explicit names are the same.
        InvalidOptionError: a dtype is not valid, or an option does not fit the kind of a member.
        MissingDependencyError: a package that a member needs is not installed.
    """
    if isinstance(members, (str, MemberSpec)):
        raise InvalidInputError(f"members must be a list; got one member: {short_repr(members)}")
    if not isinstance(members, Iterable):
        raise InvalidInputError(
            f"members must be a list of paths, hub ids or MemberSpec; got {short_repr(members)}"
        )
    specs = [as_spec(member) for member in members]
    if not specs:
        raise InvalidInputError("an ensemble needs at least one member; got none")
    names = member_names(specs)
    gguf = {
        name: spec
        for name, spec in zip(names, specs, strict=True)
        if is_gguf_member(spec, revision)
    }
    for name, spec in zip(names, specs, strict=True):
        check_kind(spec, is_gguf=name in gguf)
    sources = {name: find_gguf(spec, name, revision) for name, spec in gguf.items()}
    others = {name: spec for name, spec in zip(names, specs, strict=True) if name not in gguf}
    defaults = {
        "dtype": dtype,
        "device_map": device_map,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
    }
    loaded: dict[str, Backend] = {
        backend.name: backend
        for backend in load_huggingface([*others.values()], [*others], defaults)
    }
    loaded |= {name: load_gguf(gguf[name], name, source) for name, source in sources.items()}
    weights = {name: float(spec.weight) for name, spec in zip(names, specs, strict=True)}
    return [loaded[name] for name in names], weights if set(weights.values()) != {1.0} else None
