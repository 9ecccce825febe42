"""Load members of all kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from adafuse_llm.backends.base import Backend
from adafuse_llm.errors import InvalidInputError, short_repr
from adafuse_llm.loading.huggingface import (
    HuggingFacePlan,
    load_huggingface,
    load_huggingface_text,
    plan_huggingface,
)
from adafuse_llm.loading.processes import ProcessLoading, ProcessPlan
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
    plans = plan_huggingface(specs, names, defaults)
    loaded = _load_planned(plans)
    weights = {name: float(spec.weight) for name, spec in zip(names, specs, strict=True)}
    return loaded, weights if set(weights.values()) != {1.0} else None


def _load_planned(plans: Sequence[HuggingFacePlan]) -> list[Backend]:
    """Load members in order. Members in processes load side by side with all others."""
    apart = [_process_plan(plan) for plan in plans if plan.spec.process]
    with ProcessLoading(apart, others=len(apart) < len(plans)) as loading:
        here = [load_huggingface(plan) for plan in plans if not plan.spec.process]
        in_processes, in_this = iter(loading.members()), iter(here)
        return [next(in_processes) if plan.spec.process else next(in_this) for plan in plans]


def _process_plan(plan: HuggingFacePlan) -> ProcessPlan:
    device = plan.spec.device or plan.setting["device_map"]
    return ProcessPlan(
        plan.name,
        make=partial(load_huggingface, plan),
        text=partial(load_huggingface_text, plan),
        threads=plan.spec.threads,
        on_cpu=device is None or device == "cpu",
    )
