"""Rounds as events: under their own span, with the right parent, whatever runs beside them."""

import asyncio
import json
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.adafuse import AdaFuseLLM
from llama_index_instrumentation.dispatcher import instrument_tags

from adafuse_llm import MemberError
from adafuse_llm.summary import record
from tests.support.llama_calls import FORMS, ask, counting_engine, prompt_of, recorded

WORDS = 5
EVENTS = ("AdaFuseGenerationStartEvent", "AdaFuseRoundEvent", "AdaFuseGenerationEndEvent")


@pytest.fixture(scope="module")
def llm():
    with counting_engine(WORDS) as engine:
        yield AdaFuseLLM(engine=engine)


def check(heard: Any, decodes: int, parent: str) -> None:
    """Every decode has its events, in order, under a span of its own within `parent`'s."""
    spans = heard.closed("AdaFuse.decode")
    assert len(spans) == decodes
    for id_, span in spans.items():
        told = [e for e in heard.handler.events if e.class_name() in EVENTS and e.span_id == id_]
        names = [event.class_name() for event in told]
        assert names == [EVENTS[0], *[EVENTS[1]] * (WORDS + 1), EVENTS[2]]
        assert [event.round for event in told[1:-1]] == list(range(WORDS + 1))
        assert span.parent_id.startswith(parent)
        assert told[-1].text.split() == ["one"] * WORDS
        assert told[-1].summary.rounds == WORDS + 1
        json.dumps([event.model_dump(mode="json") for event in told], allow_nan=False)
    assert len(heard.named(EVENTS[1])) == decodes * (WORDS + 1)
    assert not heard.spans.open_spans


@pytest.mark.quick
@pytest.mark.parametrize("path", FORMS)
async def test_a_decode_has_its_events_and_the_tags_of_the_one_who_asked(llm, path):
    with recorded() as heard, instrument_tags({"user": "Anna"}):
        said = await ask(llm, path, prompt_of(path, "Count!"))
    check(heard, 1, f"AdaFuseLLM.{path}-")
    (span,) = heard.closed("AdaFuse.decode").values()
    (start,) = [*heard.named("LLMChatStartEvent"), *heard.named("LLMCompletionStartEvent")]
    assert span.parent_id == start.span_id
    assert all(e.tags == {"user": "Anna"} for name in EVENTS for e in heard.named(name))
    last = heard.named(EVENTS[1])[-1].model_dump()
    assert record(said.raw.rounds[-1]).keys() <= last.keys()


async def test_decodes_side_by_side_have_their_own_spans(llm):
    with recorded() as heard:
        await asyncio.gather(*(llm.achat([ChatMessage("Count!")]) for _ in range(8)))
    check(heard, 8, "AdaFuseLLM.achat-")
    assert len({span.parent_id for span in heard.closed("AdaFuse.decode").values()}) == 8


@pytest.mark.parametrize("path", FORMS)
async def test_a_failed_decode_drops_its_span_and_names_the_member(path):
    llm = AdaFuseLLM(engine=counting_engine(WORDS, fails_at=2))
    with recorded() as heard, pytest.raises(MemberError, match="'elm'"):
        await ask(llm, path, prompt_of(path, "Count!"))
    (span,) = heard.spans.dropped_spans[:1]
    assert span.id_.startswith("AdaFuse.decode")
    assert not heard.named(EVENTS[2])
    assert len(heard.named(EVENTS[1])) in (1, 2)  # a member may evaluate a word ahead
    assert not heard.spans.open_spans


def test_a_stream_that_is_never_read_leaves_no_span_open(llm):
    with recorded() as heard:
        stream = llm.stream_chat([ChatMessage("Count!")])
        del stream
        assert len(heard.closed("AdaFuse.decode")) == 1
    assert not heard.named(EVENTS[1])


def test_rounds_are_no_events_if_nobody_wants_them(llm):
    with recorded() as heard:
        AdaFuseLLM(engine=llm.engine, round_events=False).complete("Go")
    assert not heard.named("AdaFuseRoundEvent")
    assert heard.named("AdaFuseGenerationEndEvent")
