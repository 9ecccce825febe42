"""Check members of all kinds before their weights are loaded, and load one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from adafuse_llm.backends.base import Backend
from adafuse_llm.backends.remote import MemberText
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
from adafuse_llm.loading.specs import MemberSpec, check_kind

Plan: TypeAlias = GGUFPlan | HuggingFacePlan


def plan_members(
    specs: Sequence[MemberSpec], names: Sequence[str], defaults: Mapping[str, Any]
) -> list[Plan]:
    """Check options and files of members. Load no weights.

    Args:
        specs: the members.
        names: the members' names.
        defaults: dtype, device map, revision and whether to trust remote code, for members that do
            not set them.

    Raises:
        LoadError: a member cannot be loaded.
        UnsupportedModelError: a model cannot be a member of an ensemble.
        InvalidOptionError: a dtype is not valid, or an option does not fit the kind of a member.
        MissingDependencyError: a package that a member needs is not installed.
    """
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


def load_plan(plan: Plan) -> Backend:
    """Load a member into this process.

    Raises:
        LoadError: the member cannot be loaded.
        UnsupportedModelError: the model cannot be a member of an ensemble.
    """
    return load_gguf(plan) if isinstance(plan, GGUFPlan) else load_huggingface(plan)


def load_text(plan: Plan) -> MemberText:
    """Load the text side of a member, without its weights.

    Raises:
        LoadError: the member has no usable tokenizer.
        UnsupportedModelError: the vocabulary cannot be that of a member.
    """
    return load_gguf_text(plan) if isinstance(plan, GGUFPlan) else load_huggingface_text(plan)


def is_on_cpu(plan: Plan) -> bool:
    """Return whether a member runs on the CPU, as far as is known before it is loaded."""
    if isinstance(plan, GGUFPlan):
        return plan.on_cpu
    return (plan.spec.device or plan.setting["device_map"]) in (None, "cpu")
