"""Components of LlamaIndex with an LLM whose members fail, or write what cannot be used."""

import json

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.indices.property_graph import SchemaLLMPathExtractor
from llama_index.core.schema import TextNode
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import RequestTimeoutError
from tests.support.scripted import scripted_engine

TRIPLET = {
    "subject": {"type": "PERSON", "name": "Ada"},
    "relation": {"type": "WORKS_ON"},
    "object": {"type": "PRODUCT", "name": "Engine"},
}


def test_an_extractor_skips_a_text_whose_reply_is_cut_off() -> None:
    def reply(prompt: str) -> str:
        return json.dumps({"triplets": [TRIPLET]})[: 40 if "broken" in prompt else None]

    with scripted_engine(reply) as engine:
        llm = AdaFuseLLM(engine=engine, enforce=False)
        nodes = [TextNode(text="Ada works."), TextNode(text="broken")]
        extract = SchemaLLMPathExtractor(llm, strict=False)
        found = [len(node.metadata["nodes"]) for node in extract(nodes)]
    assert found == [2, 0]


def test_a_call_that_takes_too_long_ends() -> None:
    with scripted_engine(lambda _: "A long story. " * 50) as engine:
        llm = AdaFuseLLM(engine=engine, request_timeout=1e-6)
        with pytest.raises(RequestTimeoutError):
            llm.complete("Go")
        assert llm.chat([ChatMessage("Go")], timeout=60, max_tokens=2).message.content
