"""Components of LlamaIndex with an LLM whose members fail, or write what cannot be used."""

import json
from typing import Any

import pytest
from llama_index.core import get_response_synthesizer
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.evaluation import FaithfulnessEvaluator
from llama_index.core.extractors import DocumentContextExtractor
from llama_index.core.indices.property_graph import SchemaLLMPathExtractor
from llama_index.core.schema import NodeRelationship, NodeWithScore, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import ContextWindowError, InvalidOptionError, RequestTimeoutError
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


def test_a_mistake_of_the_caller_is_no_empty_answer() -> None:
    with scripted_engine(lambda _: '{"answer": "Paris", "query_satisfied": true}') as engine:
        llm, node = AdaFuseLLM(engine=engine), NodeWithScore(node=TextNode(text="Paris."))
        synthesizer: Any = get_response_synthesizer(llm, structured_answer_filtering=True)
        llm.context_window, llm.use = 8000, ("nobody",)
        with pytest.raises(InvalidOptionError, match="nobody"):
            synthesizer.synthesize("Where?", [node])


def test_an_evaluator_raises_the_error_itself() -> None:
    with scripted_engine(lambda _: "YES", window=64) as engine:
        judge = FaithfulnessEvaluator(AdaFuseLLM(engine=engine, context_window=4096))
        with pytest.raises(ContextWindowError):
            judge.evaluate(response="It is so.", contexts=["It is so."])


async def test_an_agent_uses_tools_of_members_whose_calls_are_only_read() -> None:
    def reply(prompt: str) -> str:
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
        return "It is 5." if "tool_response" in prompt else call

    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    with scripted_engine(reply) as engine:
        llm = AdaFuseLLM(engine=engine, enforce=False, is_function_calling_model=True)
        agent = FunctionAgent(tools=[add], llm=llm)
        assert str(await agent.run("2 + 3?")) == "It is 5."


def test_a_call_that_takes_too_long_ends() -> None:
    with scripted_engine(lambda _: "A long story. " * 50) as engine:
        llm = AdaFuseLLM(engine=engine, request_timeout=1e-6)
        with pytest.raises(RequestTimeoutError):
            llm.complete("Go")
        assert llm.chat([ChatMessage("Go")], timeout=60, max_tokens=2).message.content


async def test_contexts_of_documents_are_extracted() -> None:
    store = SimpleDocumentStore()
    store.add_documents([TextNode(id_="whole", text="A long text about mills.")])
    with scripted_engine(lambda _: "About mills.") as engine:
        extractor = DocumentContextExtractor(store, llm=AdaFuseLLM(engine=engine))
        node = TextNode(text="mills")
        node.relationships[NodeRelationship.SOURCE] = TextNode(id_="whole").as_related_node_info()
        (found,) = await extractor.aextract([node])
    assert found == {"context": "About mills."}
