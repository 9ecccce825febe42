"""Reasoning in replies: text between ``<think>`` and ``</think>`` at the beginning.

Some chat templates write the opening marker themselves, so that a reply begins inside the
reasoning. The text from this marker to the end of the prompt is the *prefix* of the reply.
"""

from __future__ import annotations

REASONING_OPENS, REASONING_CLOSES = "<think>", "</think>"

CLOSING = f"\n{REASONING_CLOSES}\n\n"
"""Text that closes open reasoning."""


def open_reasoning(text: str) -> str:
    """Return the reasoning that is open at the end of `text`, with its marker, or ""."""
    start = text.rfind(REASONING_OPENS)
    return "" if start <= text.rfind(REASONING_CLOSES) else text[start:]


def split_reasoning(text: str, prefix: str = "") -> tuple[str, str]:
    """Return the reasoning of a reply, without markers, and its answer.

    Without reasoning, the answer is the whole text. `prefix` is that of the reply.
    """
    rest = prefix + text
    thoughts: list[str] = []
    while rest.lstrip().startswith(REASONING_OPENS):
        inside = rest.lstrip().removeprefix(REASONING_OPENS)
        thought, _, rest = inside.partition(REASONING_CLOSES)
        thoughts.append(thought.strip())
        rest = rest.lstrip()
    return ("\n\n".join(filter(None, thoughts)), rest) if thoughts else ("", text)
