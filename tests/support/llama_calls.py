"""The eight ways of asking a LlamaIndex LLM, as one; and a recorder of its events."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.llms.adafuse import AdaFuseRaw
from llama_index_instrumentation import get_dispatcher

from adafuse_llm import AdaFuseConfig, AdaFuseEngine
from adafuse_llm.backends import FakeBackend

WAYS = ("", "stream_", "a", "astream_")
PATHS = [f"{way}{kind}" for kind in ("complete", "chat") for way in WAYS]

FORMS = ("complete", "astream_complete", "stream_chat", "achat")
"""Each kind of call, and each way to return: whole or in chunks, in an event loop or not."""


@dataclass
class Said:
    """What one call returned: one response, or the chunks of a stream."""

    texts: list[str]
    deltas: list[str | None]
    raws: list[AdaFuseRaw]

    @property
    def text(self) -> str:
        return self.texts[-1]

    @property
    def raw(self) -> AdaFuseRaw:
        return self.raws[-1]


async def ask(llm: Any, path: str, asked: Any, **options: Any) -> Said:
    """Ask by `path`: text for completions; text or messages for chats."""
    if "chat" in path and isinstance(asked, str):
        asked = [ChatMessage(role="user", content=asked)]
    given = getattr(llm, path)(asked, **options)
    if path.startswith("a"):
        given = await given
    if path.startswith("astream"):
        responses = [each async for each in given]
    else:
        responses = list(given) if path.startswith("stream") else [given]
    texts = [e.message.content or "" if isinstance(e, ChatResponse) else e.text for e in responses]
    return Said(texts, [each.delta for each in responses], [each.raw for each in responses])


def prompt_of(path: str, question: str) -> str:
    """A question that both a completion and a chat answer with the same text."""
    return question if "chat" in path else f"{question}\nAnswer: "


class Recorded(BaseEventHandler):
    """Events, in the order in which they came."""

    events: list[Any]

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)

    def named(self, name: str) -> list[Any]:
        return [event for event in self.events if event.class_name() == name]


@contextmanager
def recorded() -> Iterator[Recorded]:
    root, record = get_dispatcher(), Recorded(events=[])
    handlers = root.event_handlers
    root.event_handlers = [*handlers, record]
    try:
        yield record
    finally:
        root.event_handlers = handlers


def counting(words: int, *, seconds: float = 0.0, fails_at: int | None = None) -> Any:
    """A rule that writes `words` times ``one``, each in `seconds`. It may fail after some."""

    def rule(text: str) -> dict[str, float]:
        written = text.count(" one")
        time.sleep(seconds)
        if written == fails_at:
            raise RuntimeError("the cable was cut")
        return {"<end>": 0.9, "!": 0.1} if written >= words else {" one": 0.9, " two": 0.1}

    return rule


def counting_engine(words: int, **kind: Any) -> AdaFuseEngine:
    """Two members that count, one word a round. The second one is of the `kind` of `counting`."""
    members = [FakeBackend("oak", counting(words)), FakeBackend("elm", counting(words, **kind))]
    return AdaFuseEngine(members, AdaFuseConfig(max_words=1))
