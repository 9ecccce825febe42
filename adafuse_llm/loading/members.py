"""Load members of all kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from adafuse_llm.backends.base import Backend
from adafuse_llm.errors import InvalidInputError, short_repr
from adafuse_llm.loading.huggingface import load_huggingface
from adafuse_llm.loading.specs import MemberSpec, as_spec, member_names

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

    Returns:
        The members; and their weights by name, or None if all weights are 1.

    Raises:
        LoadError: a member cannot be loaded.
        UnsupportedModelError: a model cannot be a member of an ensemble.
        InvalidInputError: `members` is empty, or two explicit names are the same.
        InvalidOptionError: a dtype is not valid.
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
    defaults = {
        "dtype": dtype,
        "device_map": device_map,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
    }
    loaded: list[Backend] = [*load_huggingface(specs, names, defaults)]
    weights = {name: float(spec.weight) for name, spec in zip(names, specs, strict=True)}
    return loaded, weights if set(weights.values()) != {1.0} else None
