"""Fields of requests whose meaning depends on the members: variables of templates, raw prompts."""

from __future__ import annotations

from typing import Any

from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.serving.openai_requests import ServedRequest
from adafuse_llm.text.prompt_warnings import spelled_token
from adafuse_llm.text.templates import SWITCHES


def with_variables(
    engine: AdaFuseEngine, options: dict[str, Any], asked: ServedRequest
) -> dict[str, Any]:
    """Return options with the variables for chat templates that a request has.

    A variable that no template reads is ignored. ``reasoning_effort`` is a variable; ``none`` also
    switches reasoning off.

    Raises:
        ApiError: a variable is ignored, and the server is strict.
    """
    active = engine.config.override(options).use or engine.members
    backends = [backend for backend in engine.backends if backend.name in active]
    known = {name for each in backends for name in each.codec.template_facts.variables}
    given = dict(options.get("chat_template_kwargs") or {})
    for name, value in asked.variables.items():
        if name in given:
            continue
        if name in engine.members or name in known:
            given[name] = value
        else:
            asked.ignored.add(
                f"chat_template_kwargs.{name}", "no chat template of the members reads it"
            )
    if asked.effort is not None:
        switch = next((name for name in SWITCHES if name in known), None)
        if "reasoning_effort" in known:
            given.setdefault("reasoning_effort", asked.effort)
        elif asked.effort == "none" and switch is not None:
            given.setdefault(switch, False)
        else:
            name = "reasoning_effort" if asked.echoed is None else "reasoning.effort"
            asked.ignored.add(name, "no chat template of the members reads it")
    return {**options, "chat_template_kwargs": given} if given else options


def check_prompts(engine: AdaFuseEngine, options: dict[str, Any], asked: ServedRequest) -> None:
    """Warn the client of a raw prompt that spells out a control token of a member."""
    active = engine.config.override(options).use or engine.members
    for backend in engine.backends:
        for prompt in asked.prompts if backend.name in active else ():
            if warning := spelled_token(backend.name, backend.codec, prompt):
                asked.ignored.warnings.append(warning)
                return
