"""Fields of requests whose meaning depends on the members: variables of templates, token ids."""

from __future__ import annotations

from typing import Any

from adafuse_llm.engine import AdaFuseEngine
from adafuse_llm.errors import AdaFuseError
from adafuse_llm.serving.openai_fields import NO_IDS
from adafuse_llm.serving.openai_requests import ServedRequest
from adafuse_llm.text.reply_start import template_facts
from adafuse_llm.text.templates import SWITCHES

TEXTS = "send {'adafuse': {'logit_bias': {text: number}}}"


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
    facts = [template_facts(b.codec) for b in engine.backends if b.name in active]
    given = dict(options.get("chat_template_kwargs") or {})
    for name, value in asked.variables.items():
        if name in given:
            continue
        if name in engine.members or any(each.reads(name) for each in facts):
            given[name] = value
        else:
            asked.ignored.add(
                f"chat_template_kwargs.{name}", "no chat template of the members reads it"
            )
    if asked.effort is not None:
        known = set().union(*(each.variables or () for each in facts))
        switch = next((name for name in SWITCHES if name in known), None)
        if "reasoning_effort" in known:
            given.setdefault("reasoning_effort", asked.effort)
        elif asked.effort == "none" and switch is not None:
            given.setdefault(switch, False)
        else:
            name = "reasoning_effort" if asked.echoed is None else "reasoning.effort"
            asked.ignored.add(name, "no chat template of the members reads it")
    return {**options, "chat_template_kwargs": given} if given else options


def with_token_bias(
    engine: AdaFuseEngine, options: dict[str, Any], asked: ServedRequest
) -> dict[str, Any]:
    """Return options with the texts of the token ids in ``logit_bias``.

    Ids have a meaning only if one member answers alone. An id whose text does not become the same
    token again is ignored.

    Raises:
        ApiError: an id is ignored, and the server is strict.
    """
    active = engine.config.override(options).use or engine.members
    if len(active) != 1:
        asked.ignored.add("logit_bias", f"{NO_IDS}; {TEXTS}")
        return options
    (backend,) = (each for each in engine.backends if each.name == active[0])
    context = backend.codec.encode_prompt("a")
    texts: dict[str, float] = dict(options.get("logit_bias") or {})
    for token, bias in asked.token_bias.items():
        try:
            text = backend.codec.decode_continuation(context, [token])
            is_exact = bool(text) and engine.encode_text(text, use=active) == {active[0]: [token]}
        except (AdaFuseError, IndexError, OverflowError, KeyError, ValueError, TypeError):
            is_exact = False
        if is_exact:
            texts[text] = bias
        else:
            asked.ignored.add(f"logit_bias.{token}", f"it has no text of its own; {TEXTS}")
    return {**options, "logit_bias": texts} if texts else options
