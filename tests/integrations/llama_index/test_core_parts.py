"""Parts of LlamaIndex that are not in its public interface: each has a fallback.

If one of the first tests fails, core has changed. Then adapt the code that uses the part.
"""

from __future__ import annotations

import pytest
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.utilities.token_counting import TokenCounter
from llama_index.llms.adafuse import AdaFuseLLM
from llama_index.llms.adafuse._tokens import COUNTER, MemberTokenCounter

from tests.support.scripted import scripted_engine

pytestmark = pytest.mark.quick

CHANGED = "llama-index-core has changed"


@pytest.fixture
def llm():
    with scripted_engine(lambda prompt: "Yes.") as engine:
        yield AdaFuseLLM(engine=engine)


def test_l8_prompt_helpers_have_a_counter() -> None:
    assert isinstance(getattr(PromptHelper(100, 10), COUNTER, None), TokenCounter), CHANGED


def test_l8_a_prompt_helper_without_the_counter_still_packs(llm, monkeypatch, caplog) -> None:
    assert isinstance(getattr(llm.prompt_helper(), COUNTER), MemberTokenCounter)
    assert not caplog.records
    monkeypatch.setattr("llama_index.llms.adafuse._tokens.COUNTER", "_renamed")
    helper = llm.prompt_helper()
    assert type(getattr(helper, COUNTER)) is TokenCounter
    assert "Settings.tokenizer = llm.tokenizer" in caplog.text
