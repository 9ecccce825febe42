"""Every round is an event of the span of its call, even if calls run side by side."""

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
ROUND = "AdaFuseRoundEvent"


@pytest.fixture(scope="module")
def llm():
    with counting_engine(WORDS) as engine:
        yield AdaFuseLLM(engine=engine)


def check(heard: Any, calls: int) -> None:
    """The rounds of every call have its span, and are in order."""
    starts = [*heard.named("LLMChatStartEvent"), *heard.named("LLMCompletionStartEvent")]
    assert len({start.span_id for start in starts}) == calls
    for start in starts:
        told = [event for event in heard.named(ROUND) if event.span_id == start.span_id]
        assert [event.round for event in told] == list(range(WORDS + 1))
        assert "".join(event.text for event in told).split() == ["one"] * WORDS
        json.dumps([event.model_dump(mode="json") for event in told], allow_nan=False)
    assert len(heard.named(ROUND)) == calls * (WORDS + 1)


@pytest.mark.quick
@pytest.mark.parametrize("path", FORMS)
async def test_a_decode_has_its_rounds_and_the_tags_of_the_one_who_asked(llm, path):
    with recorded() as heard, instrument_tags({"user": "Anna"}):
        said = await ask(llm, path, prompt_of(path, "Count!"))
    check(heard, 1)
    assert all(event.tags == {"user": "Anna"} for event in heard.named(ROUND))
    last = heard.named(ROUND)[-1].model_dump()
    assert record(said.raw.rounds[-1]).keys() <= last.keys()


async def test_calls_side_by_side_have_their_own_spans(llm):
    with recorded() as heard:
        await asyncio.gather(*(llm.achat([ChatMessage("Count!")]) for _ in range(8)))
    check(heard, 8)


@pytest.mark.parametrize("path", FORMS)
async def test_a_failed_decode_names_the_member(path):
    llm = AdaFuseLLM(engine=counting_engine(WORDS, fails_at=2))
    with recorded() as heard, pytest.raises(MemberError, match="'elm'"):
        await ask(llm, path, prompt_of(path, "Count!"))
    assert len(heard.named(ROUND)) in (1, 2)  # a member may evaluate a word ahead


def test_rounds_are_no_events_if_nobody_wants_them(llm):
    with recorded() as heard:
        AdaFuseLLM(engine=llm.engine, round_events=False).complete("Go")
    assert not heard.named(ROUND)
