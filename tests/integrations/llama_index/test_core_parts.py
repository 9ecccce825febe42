"""Parts of LlamaIndex that are not in its public interface: each has a fallback.

If one of the first tests fails, core has changed. Then adapt the code that uses the part.
"""

from __future__ import annotations

from typing import Any

import llama_index_instrumentation.dispatcher as instrumentation
import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler
from llama_index.core.utilities.token_counting import TokenCounter
from llama_index.llms.adafuse import AdaFuseLLM
from llama_index.llms.adafuse._tokens import COUNTER, MemberTokenCounter
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import instrument_tags

from tests.support.scripted import scripted_engine

pytestmark = pytest.mark.quick

CHANGED = "llama-index-core has changed"
TAGS = {"customer": "seven"}


@pytest.fixture
def llm():
    with scripted_engine(lambda prompt: "Yes.") as engine:
        yield AdaFuseLLM(engine=engine)


def test_l8_prompt_helpers_have_a_counter() -> None:
    assert isinstance(getattr(PromptHelper(100, 10), COUNTER, None), TokenCounter), CHANGED


def test_l8_spans_have_tags() -> None:
    with instrument_tags(TAGS):
        assert instrumentation.active_instrument_tags.get() == TAGS, CHANGED


def test_l8_a_prompt_helper_without_the_counter_still_packs(llm, monkeypatch, caplog) -> None:
    assert isinstance(getattr(llm.prompt_helper(), COUNTER), MemberTokenCounter)
    assert not caplog.records
    monkeypatch.setattr("llama_index.llms.adafuse._tokens.COUNTER", "_renamed")
    helper = llm.prompt_helper()
    assert type(getattr(helper, COUNTER)) is TokenCounter
    assert "Settings.tokenizer = llm.tokenizer" in caplog.text


@pytest.mark.parametrize("is_there", [True, False])
def test_l8_spans_of_decodes_have_the_tags_that_can_be_read(llm, is_there, monkeypatch) -> None:
    seen: list[Any] = []

    class Handler(SimpleSpanHandler):
        def new_span(self, id_, bound_args, instance=None, parent_span_id=None, tags=None, **more):
            if id_.startswith("AdaFuse.decode"):
                seen.append(tags)
            return super().new_span(id_, bound_args, instance, parent_span_id, tags, **more)

    root, handler = get_dispatcher(), Handler()
    monkeypatch.setattr(root, "span_handlers", [handler])
    if not is_there:
        variable = instrumentation.active_instrument_tags
        monkeypatch.setattr("llama_index.llms.adafuse._decode.instrumentation", object())
        assert variable.get() == {}
    with instrument_tags(TAGS):
        assert llm.chat([ChatMessage(content="Is it?")]).message.content == "Yes."
    assert seen == [TAGS if is_there else {}]
