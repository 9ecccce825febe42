"""What LangChain's standard tests ask of chat models, asked of text models."""

from __future__ import annotations

import pytest
from langchain_core.callbacks import BaseCallbackHandler

from adafuse_llm.embedded import member_paths
from langchain_adafuse import AdaFuseLLM

pytestmark = pytest.mark.disable_socket

PROMPT = """The Silesse Mill was founded by Jenbert Zalwyn and opens at 8:45.

Question: Who founded the Silesse Mill?
Answer:"""


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


@pytest.fixture(scope="module")
def model():
    paths = [str(path) for path in member_paths()[:2]]
    made = AdaFuseLLM(members=paths, branching_factor=1, max_tokens=100, timeout=60, max_retries=2)
    yield made
    made.unload()


@pytest.fixture(scope="module")
def whole(model):
    return model.invoke(PROMPT)


async def test_callbacks(model, whole):
    heard = Recorder()
    config = {"callbacks": [heard], "tags": ["a"], "metadata": {"b": 1}, "run_name": "c"}
    assert model.invoke(PROMPT, config) == whole
    assert "".join(heard.tokens) == whole
    list(model.stream(PROMPT, {"callbacks": [heard]}))
    assert "".join(heard.tokens) == whole * 2
    _ = [piece async for piece in model.astream(PROMPT, {"callbacks": [heard]})]
    assert "".join(heard.tokens) == whole * 3
    assert [result.generations[0][0].text for result in heard.results] == [whole] * 3
    with pytest.raises(ValueError, match="empty"):
        model.invoke("", {"callbacks": [heard]})
    assert len(heard.errors) == 1
    (_, prompts, told) = heard.started[0]
    assert prompts == [PROMPT]
    assert (told["tags"], told["metadata"]["b"], told["name"]) == (["a"], 1, "c")
    assert told["invocation_params"]["options"]["max_new_tokens"] == 100
