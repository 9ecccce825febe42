"""Load members of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from adafuse_llm.backends.base import Backend
from adafuse_llm.backends.remote import MemberText
from adafuse_llm.errors import InvalidInputError, short_repr
from adafuse_llm.loading.gguf import (
    GGUFPlan,
    is_gguf_member,
    load_gguf,
    load_gguf_text,
    plan_gguf,
)
from adafuse_llm.loading.huggingface import (
    HuggingFacePlan,
    check_dtype,
    load_huggingface,
    load_huggingface_text,
    plan_huggingface,
)
from adafuse_llm.loading.processes import ProcessLoading, ProcessPlan, share_of_threads
from adafuse_llm.loading.specs import MemberSpec, as_spec, check_kind, member_names

if TYPE_CHECKING:
    import torch


Plan: TypeAlias = GGUFPlan | HuggingFacePlan


def load_members(
    members: Sequence[str | MemberSpec],
    *,
    dtype: str | torch.dtype = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> tuple[list[Backend], dict[str, float] | None]:
    """Load members in order.

    All options and files are checked before any weights are loaded. `dtype`, `device_map` and
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
    defaults = {
        "dtype": dtype,
        "device_map": device_map,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
    }
    loaded = _load_planned(_plan(specs, names, defaults))
    weights = {name: float(spec.weight) for name, spec in zip(names, specs, strict=True)}
    return loaded, weights if set(weights.values()) != {1.0} else None


def _plan(
    specs: Sequence[MemberSpec], names: Sequence[str], defaults: Mapping[str, Any]
) -> list[Plan]:
    """Check options and files of all members. Load no weights."""
    check_dtype(defaults["dtype"])
    revision = defaults["revision"]
    of_gguf = [is_gguf_member(spec, revision) for spec in specs]
    for spec, is_gguf in zip(specs, of_gguf, strict=True):
        check_kind(spec, is_gguf=is_gguf)
    members = list(zip(specs, names, of_gguf, strict=True))
    gguf = {name: plan_gguf(spec, name, revision) for spec, name, is_gguf in members if is_gguf}
    others = [(spec, name) for spec, name, is_gguf in members if not is_gguf]
    planned = plan_huggingface([spec for spec, _ in others], [name for _, name in others], defaults)
    plans: dict[str, Plan] = {**gguf, **{plan.name: plan for plan in planned}}
    return [plans[name] for name in names]


def _load_planned(plans: Sequence[Plan]) -> list[Backend]:
    """Load members in order. Members in processes load side by side with all others."""
    in_processes = [plan for plan in plans if plan.spec.process]
    lanes = sum(map(_is_on_cpu, in_processes)) + (len(in_processes) < len(plans))
    share = share_of_threads(lanes)
    with ProcessLoading([_process_plan(plan, share) for plan in in_processes]) as loading:
        here = [_load(plan) for plan in plans if not plan.spec.process]
        apart, together = iter(loading.members()), iter(here)
        return [next(apart) if plan.spec.process else next(together) for plan in plans]


def _load(plan: Plan) -> Backend:
    return load_gguf(plan) if isinstance(plan, GGUFPlan) else load_huggingface(plan)


def _is_on_cpu(plan: Plan) -> bool:
    """Return whether a member runs on the CPU, as far as is known before it is loaded."""
    if isinstance(plan, GGUFPlan):
        return plan.on_cpu
    return (plan.spec.device or plan.setting["device_map"]) in (None, "cpu")


def _process_plan(plan: Plan, share: int) -> ProcessPlan:
    """Return how to load a member in a process.

    Args:
        plan: the member.
        share: the member's share of the CPU's cores.
    """
    if isinstance(plan, GGUFPlan):
        make: Callable[[], Backend] = partial(load_gguf, plan)
        text: Callable[[], MemberText] = partial(load_gguf_text, plan)
    else:
        make = partial(load_huggingface, plan)
        text = partial(load_huggingface_text, plan)
    return ProcessPlan(plan.name, make, text, plan.spec.threads, share)
