"""Warnings about what the members of an engine read."""

from __future__ import annotations

from collections.abc import Mapping

from adafuse_llm.text.codec import TextCodec


def spelled_token(name: str, codec: TextCodec, prompt: str) -> str | None:
    """Return a warning if a prompt spells out a control token of a member, or None."""
    token = codec.control_token_in(prompt)
    return token and (
        f"the prompt contains {token!r}, which is a control token of member {name!r}. In a prompt, "
        "it is plain text, so the member reads neither a conversation nor a gap to fill in. To "
        "send a conversation, pass messages=[...]; each member then uses its own chat template"
    )


def mixed_templates(has_template: Mapping[str, bool]) -> str | None:
    """Return a warning if some members have a chat template and others do not, or None."""
    plain = [name for name, has in has_template.items() if not has]
    others = [name for name, has in has_template.items() if has]
    if not plain or not others:
        return None
    return (
        f"only some members have a chat template: {', '.join(map(repr, others))}, but not "
        f"{', '.join(map(repr, plain))}. Members without one are usually base models. They read "
        "messages as plain text (User: ...), and often expect other answers than members with one. "
        "Use only instruction-tuned models or only base models, or leave members out with use=[...]"
    )
