"""What LangChain's standard tests ask of chat models, asked of text models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseLLM
from langchain_core.load import dumpd
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import ConfigurableField

from adafuse_llm.embedded import member_paths
from langchain_adafuse import AdaFuseLLM

pytestmark = pytest.mark.disable_socket

PROMPT = """The Silesse Mill was founded by Jenbert Zalwyn and opens at 8:45.

Question: Who founded the Silesse Mill?
Answer:"""
OTHER = PROMPT.replace("Jenbert Zalwyn", "Hilas Monek")


class Recorder(BaseCallbackHandler):
    def __init__(self):
        self.started, self.tokens, self.results, self.errors = [], [], [], []

    def on_llm_start(self, serialized, prompts, **kwargs):
        self.started.append((serialized, prompts, kwargs))

    def on_llm_new_token(self, token, *, chunk=None, **kwargs):
        assert chunk.text == token
        self.tokens.append(token)

    def on_llm_end(self, response, **kwargs):
        self.results.append(response)

    def on_llm_error(self, error, **kwargs):
        self.errors.append(error)


class TextModelTests:
    """Subclasses say what is tested.

    Attributes:
        llm_class: the class.
        params: what it is made with.
    """

    llm_class: Any

    @property
    def params(self) -> dict[str, Any]:
        raise NotImplementedError

    @pytest.fixture
    def model(self) -> BaseLLM:
        standard = {"temperature": 0, "max_tokens": 100, "timeout": 60, "max_retries": 2}
        return self.llm_class(**{**standard, "stop": [], **self.params})

    # Without an answer

    def test_init(self):
        assert self.llm_class(**self.params)
        assert self.llm_class(**self.params, streaming=True, api_key="test")

    def test_standard_params(self, model):
        params = model._get_ls_params(stop=["x"])
        assert params["ls_provider"] == "adafuse"
        assert params["ls_model_type"] == "llm"
        assert params["ls_model_name"] == "wren+heron"
        assert params["ls_max_tokens"] == 100
        assert params["ls_temperature"] == 0
        assert params["ls_stop"] == ["x"]
        params = model._get_ls_params(model="other", max_new_tokens=5, temperature=0.5)
        assert params["ls_model_name"] == "other"
        assert params["ls_max_tokens"] == 5
        assert params["ls_temperature"] == 0.5

    def test_serialization(self, model):
        assert self.llm_class.is_lc_serializable()
        assert json.loads(json.dumps(dumpd(model))) == dumpd(model)
        assert json.loads(json.dumps(model.asdict())) == model.asdict()
        assert model.asdict()["_type"] == "adafuse"

    def test_repr_and_schemas(self, model):
        assert self.llm_class.__name__ in repr(model)
        assert model.get_output_jsonschema()["type"] == "string"
        assert model.get_input_jsonschema()

    # Answers

    def test_invoke(self, model):
        reply = model.invoke(PROMPT)
        assert isinstance(reply, str)
        assert reply

    async def test_ainvoke(self, model):
        assert await model.ainvoke(PROMPT) == model.invoke(PROMPT)

    def test_stream(self, model):
        pieces = list(model.stream(PROMPT))
        assert len(pieces) > 1
        assert all(isinstance(piece, str) for piece in pieces)
        assert "".join(pieces) == model.invoke(PROMPT)

    async def test_astream(self, model):
        pieces = [piece async for piece in model.astream(PROMPT)]
        assert "".join(pieces) == model.invoke(PROMPT)

    def test_batch(self, model):
        assert model.batch([PROMPT, OTHER]) == [model.invoke(PROMPT), model.invoke(OTHER)]
        assert model.batch([]) == []
        assert model.batch([PROMPT] * 3, {"max_concurrency": 2}) == [model.invoke(PROMPT)] * 3

    async def test_abatch(self, model):
        assert await model.abatch([PROMPT, OTHER]) == model.batch([PROMPT, OTHER])
        assert await model.abatch([]) == []

    def test_batch_with_an_error(self, model):
        replies = model.batch(["", PROMPT], return_exceptions=True)
        assert all(isinstance(each, ValueError) for each in replies)

    def test_transform(self, model):
        assert "".join(model.transform(iter([PROMPT[:9], PROMPT[9:]]))) == model.invoke(PROMPT)

    async def test_batch_as_completed(self, model):
        done = dict(model.batch_as_completed([PROMPT, PROMPT]))
        assert done == {0: model.invoke(PROMPT), 1: model.invoke(PROMPT)}
        adone = {place: reply async for place, reply in model.abatch_as_completed([PROMPT] * 2)}
        assert adone == done

    def test_messages_as_a_prompt(self, model):
        assert model.invoke([SystemMessage("Be kind."), HumanMessage("Hello")])
        chain = ChatPromptTemplate.from_messages([("user", "{text}")]) | model
        assert chain.invoke({"text": "Hello"})

    def test_stop(self, model):
        whole = model.invoke(PROMPT)
        stopped = model.invoke(PROMPT, stop=[" by"])
        assert whole.startswith(stopped)
        assert " by" not in stopped
        assert "".join(model.stream(PROMPT, stop=[" by"])) == stopped
        assert model.bind(stop=[" by"]).invoke(PROMPT) == stopped
        assert self.llm_class(**{**self.params, "stop": [" by"]}).invoke(PROMPT) == stopped
        bound = self.llm_class(**{**self.params, "stop": [" by"]})
        assert bound.invoke(PROMPT, stop=[]) == whole

    def test_model_override(self, model):
        result = model.generate([PROMPT], model="heron")
        assert result.generations[0][0].generation_info["model_name"] == "heron"

    async def test_usage(self, model):
        for result in (model.generate([PROMPT, PROMPT]), await model.agenerate([PROMPT, PROMPT])):
            assert isinstance(result, LLMResult)
            assert result.llm_output is not None
            total = result.llm_output["token_usage"]
            assert total["total_tokens"] == total["prompt_tokens"] + total["completion_tokens"]
            for (generation,) in result.generations:
                info = generation.generation_info
                assert info is not None
                assert info["finish_reason"] == "stop"
                assert info["usage_metadata"]["output_tokens"] > 0
                assert set(info["usage_by_member"]["wren"]) >= {"forward_passes", "cached_tokens"}

    async def test_callbacks(self, model):
        heard = Recorder()
        whole = model.invoke(PROMPT, {"callbacks": [heard]})
        list(model.stream(PROMPT, {"callbacks": [heard]}))
        assert "".join(heard.tokens) == whole
        _ = [piece async for piece in model.astream(PROMPT, {"callbacks": [heard]})]
        assert "".join(heard.tokens) == whole * 2
        assert [result.generations[0][0].text for result in heard.results] == [whole] * 3
        with pytest.raises(ValueError, match="empty"):
            model.invoke("", {"callbacks": [heard]})
        assert len(heard.errors) == 1

    def test_tags_metadata_and_names(self, model):
        heard = Recorder()
        config = {"callbacks": [heard], "tags": ["a"], "metadata": {"b": 1}, "run_name": "c"}
        model.invoke(PROMPT, config)
        (_, prompts, told) = heard.started[0]
        assert prompts == [PROMPT]
        assert told["tags"] == ["a"]
        assert told["metadata"]["b"] == 1
        assert told["name"] == "c"
        assert told["invocation_params"]["options"]["max_new_tokens"] == 100

    async def test_events(self, model):
        names = [e["event"] async for e in model.astream_events(PROMPT, version="v2")]
        assert names[0] == "on_llm_start"
        assert names[-1] == "on_llm_end"
        assert "on_llm_stream" in names

    async def test_caching(self, model):
        model.cache = InMemoryCache()
        heard = Recorder()
        first = model.invoke(PROMPT, {"callbacks": [heard]})
        assert model.invoke(PROMPT, {"callbacks": [heard]}) == first
        assert await model.ainvoke(PROMPT, {"callbacks": [heard]}) == first
        assert len(heard.started) == 1
        assert model.invoke(PROMPT, max_new_tokens=1) != first
        assert model.batch([PROMPT, OTHER]) == [first, model.invoke(OTHER)]

    def test_configurable_fields(self, model):
        chosen = model.configurable_fields(max_new_tokens=ConfigurableField(id="length"))
        short = chosen.invoke(PROMPT, {"configurable": {"length": 1}})
        assert model.invoke(PROMPT).startswith(short)
        assert chosen.invoke(PROMPT) == model.invoke(PROMPT) != short

    def test_fallbacks_and_retries(self, model):
        assert model.with_fallbacks([model]).invoke(PROMPT) == model.invoke(PROMPT)
        assert model.with_retry(stop_after_attempt=2).invoke(PROMPT) == model.invoke(PROMPT)

    async def test_chain(self, model):
        chain = PromptTemplate.from_template("{text}\nAnswer:") | model
        whole, asked = model.invoke(PROMPT), {"text": PROMPT.removesuffix("\nAnswer:")}
        assert chain.invoke(asked) == whole
        assert "".join([piece async for piece in chain.astream(asked)]) == whole

    def test_number_of_tokens(self, model):
        assert 0 < model.get_num_tokens("Hello") < model.get_num_tokens("Hello, how are you?")


class TestAdaFuseLLM(TextModelTests):
    llm_class = AdaFuseLLM

    @property
    def params(self) -> dict[str, Any]:
        return {"members": member_paths()[:2], "branching_factor": 1}
