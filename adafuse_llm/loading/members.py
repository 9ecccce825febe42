"""Load members of all kinds."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from adafuse_llm.backends.base import Backend
from adafuse_llm.loading.gguf import GGUFPlan, is_gguf_member, load_gguf, plan_gguf
from adafuse_llm.loading.huggingface import (
    HuggingFacePlan,
    check_dtype,
    load_huggingface,
    plan_huggingface,
)
from adafuse_llm.loading.servers import ServerPlan, load_server
from adafuse_llm.loading.specs import MemberSpec, as_specs, check_kind, member_names

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Plan: TypeAlias = GGUFPlan | HuggingFacePlan | ServerPlan


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
    `trust_remote_code` do not apply to GGUF members. The log has the seconds of each member.

    Returns:
        The members; and their weights by name, or None if all weights are 1.

    Raises:
        LoadError: a member cannot be loaded.
        UnsupportedModelError: a model cannot be a member of an ensemble.
        InvalidInputError: `members` is empty, or two explicit names are the same.
        InvalidOptionError: a dtype is not valid, or an option does not fit the kind of a member.
        MissingDependencyError: a package that a member needs is not installed.
    """
    specs = as_specs(members)
    names = member_names(specs)
    defaults = {
        "dtype": dtype,
        "device_map": device_map,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
    }
    plans = _plan(dict(zip(names, specs, strict=True)), defaults)
    loaded: dict[str, Backend] = {}
    with _closing(loaded):
        for name in sorted(names, key=lambda name: not isinstance(plans[name], ServerPlan)):
            start = time.monotonic()
            loaded[name] = _load(plans[name])
            logger.info("member %r is loaded in %.1f s", name, time.monotonic() - start)
    weights = {name: float(spec.weight) for name, spec in zip(names, specs, strict=True)}
    ordered = [loaded[name] for name in names]
    return ordered, weights if set(weights.values()) != {1.0} else None


@contextmanager
def _closing(loaded: Mapping[str, Backend]) -> Iterator[None]:
    """Close the members that are loaded so far if the block fails."""
    try:
        yield
    except BaseException:
        for member in loaded.values():
            member.close()
        raise


def _plan(specs: Mapping[str, MemberSpec], defaults: Mapping[str, Any]) -> dict[str, Plan]:
    """Check options and files of members. Load no weights, and ask no inference server.

    Args:
        specs: the members by name.
        defaults: dtype, device map, revision and whether to trust remote code, for members that do
            not set them.

    Returns:
        How to load each member, by name.
    """
    check_dtype(defaults["dtype"])
    revision = defaults["revision"]
    served = {name: spec for name, spec in specs.items() if spec.url is not None}
    local = {name: spec for name, spec in specs.items() if spec.url is None}
    of_gguf = {name: is_gguf_member(spec, revision) for name, spec in local.items()}
    for name, spec in local.items():
        check_kind(spec, is_gguf=of_gguf[name])
    gguf = {name: spec for name, spec in local.items() if of_gguf[name]}
    others = {name: spec for name, spec in local.items() if not of_gguf[name]}
    planned: list[Plan] = [
        *(ServerPlan(spec, name, spec.revision or revision) for name, spec in served.items()),
        *(plan_gguf(spec, name, revision) for name, spec in gguf.items()),
        *plan_huggingface(list(others.values()), list(others), defaults),
    ]
    return {plan.name: plan for plan in planned}


def _load(plan: Plan) -> Backend:
    """Load a member, or connect to its server."""
    if isinstance(plan, ServerPlan):
        return load_server(plan)
    return load_gguf(plan) if isinstance(plan, GGUFPlan) else load_huggingface(plan)
