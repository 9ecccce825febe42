"""Load members of all kinds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from adafuse_llm.backends.base import Backend, SupportsClose
from adafuse_llm.backends.remote.processes import ADVICE
from adafuse_llm.errors import InvalidInputError, short_repr
from adafuse_llm.loading.gguf import GGUFPlan
from adafuse_llm.loading.plans import Plan, is_on_cpu, load_plan, load_text, plan_members
from adafuse_llm.loading.processes import ProcessLoading, ProcessPlan, share_of_threads
from adafuse_llm.loading.servers import ServerPlan, load_server
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
        raise InvalidInputError(
            f"members must be a list; got one member: {short_repr(members)}. Pass [member]."
        )
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
    loaded = _load_all(specs, names, defaults)
    weights = {name: float(spec.weight) for name, spec in zip(names, specs, strict=True)}
    return loaded, weights if set(weights.values()) != {1.0} else None


def _load_all(
    specs: Sequence[MemberSpec], names: Sequence[str], defaults: Mapping[str, Any]
) -> list[Backend]:
    """Load members in order. Members in processes load side by side with all others."""
    near = [i for i, spec in enumerate(specs) if spec.url is None]
    served = [i for i, spec in enumerate(specs) if spec.url is not None]
    plans = plan_members([specs[i] for i in near], [names[i] for i in near], defaults)
    loaded: dict[int, Backend] = {}
    with _closing(loaded):
        for i in served:
            revision = specs[i].revision or defaults["revision"]
            loaded[i] = load_server(ServerPlan(specs[i], names[i], revision))
        loaded.update(zip(near, _load_planned(plans), strict=True))
    return [loaded[i] for i in range(len(specs))]


@contextmanager
def _closing(loaded: Mapping[int, Backend]) -> Iterator[None]:
    """Close the members that are loaded so far if the block fails."""
    try:
        yield
    except BaseException:
        for member in loaded.values():
            if isinstance(member, SupportsClose):
                member.close()
        raise


def _load_planned(plans: Sequence[Plan]) -> list[Backend]:
    """Load members into this process and into processes of their own, side by side."""
    in_processes = [plan for plan in plans if plan.spec.process]
    lanes = sum(map(is_on_cpu, in_processes)) + (len(in_processes) < len(plans))
    share = share_of_threads(lanes)
    with ProcessLoading([_process_plan(plan, share) for plan in in_processes]) as loading:
        here = [load_plan(plan) for plan in plans if not plan.spec.process]
        apart, together = iter(loading.members()), iter(here)
        return [next(apart) if plan.spec.process else next(together) for plan in plans]


def _process_plan(plan: Plan, share: int) -> ProcessPlan:
    """Return how to load a member in a process.

    Args:
        plan: the member.
        share: the member's share of the CPU's cores.
    """
    advice = plan.advice if isinstance(plan, GGUFPlan) else ADVICE
    return ProcessPlan(
        *(plan.name, partial(load_plan, plan), partial(load_text, plan), plan.spec.threads, share),
        advice,
    )
