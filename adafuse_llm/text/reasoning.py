"""Reasoning in replies: text between ``<think>`` and ``</think>`` at the beginning.

Some chat templates write the opening marker themselves, so that a reply begins inside the
reasoning. The text from this marker to the end of the prompt is the *prefix* of the reply.
"""

from __future__ import annotations

REASONING_OPENS, REASONING_CLOSES = "<think>", "</think>"

CLOSING = f"\n{REASONING_CLOSES}\n\n"
"""Text that ends reasoning that a member has not ended itself."""


def open_reasoning(text: str) -> str:
    """Return the end of `text` from the last opening marker, or "" if reasoning is not open."""
    start = text.rfind(REASONING_OPENS)
    return "" if start <= text.rfind(REASONING_CLOSES) else text[start:]


def split_reasoning(text: str, prefix: str = "") -> tuple[str, str]:
    """Split a reply into its reasoning and its answer.

    Args:
        text: the reply.
        prefix: text with which the chat templates began the reply.

    Returns:
        The reasoning without markers and without whitespace at its ends, and the rest of the reply.
        A reply without reasoning is the answer, unchanged.
    """
    rest = prefix + text
    thoughts: list[str] = []
    while rest.lstrip().startswith(REASONING_OPENS):
        inside = rest.lstrip().removeprefix(REASONING_OPENS)
        thought, _, rest = inside.partition(REASONING_CLOSES)
        thoughts.append(thought.strip())
        rest = rest.lstrip()
    return ("\n\n".join(filter(None, thoughts)), rest) if thoughts else ("", text)
