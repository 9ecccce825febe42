"""Events that tell with which text the chat templates began the reply."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from adafuse_llm.decoding.member import MemberQuery
from adafuse_llm.results import StreamEvent


def with_prefix(event: StreamEvent, prefix: str) -> StreamEvent:
    """Return an event with the prefix of the reply, also in its generation."""
    if not prefix:
        return event
    update = {"reply_prefix": prefix}
    generation = event.generation and event.generation.model_copy(update=update)
    return event.model_copy(update={**update, "generation": generation})


def with_prefixes(
    steps: Generator[tuple[MemberQuery, ...] | StreamEvent, None, None], prefix: str
) -> Generator[tuple[MemberQuery, ...] | StreamEvent, None, None]:
    """Yield the steps of a request, with the prefix of the reply in every event."""
    with closing(steps):
        for step in steps:
            yield with_prefix(step, prefix) if isinstance(step, StreamEvent) else step
