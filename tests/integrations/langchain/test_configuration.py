"""Fields, options of calls, and what is loaded when."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import re
import warnings
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumpd, dumps, load, loads
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField
from pydantic import BaseModel

from adafuse_llm import (
    AdaFuseConfig,
    AdaFuseEngine,
    InvalidOptionError,
    RuntimeConfig,
    TransformersMember,
)
from adafuse_llm.backends import FakeBackend
from adafuse_llm.text.matchers import is_available
from langchain_adafuse import AdaFuseLLM, ChatAdaFuse
from tests.support.models import CHATML
from tests.support.scripted import scripted, scripted_engine

BOTH = pytest.mark.parametrize("kind", [AdaFuseLLM, ChatAdaFuse])


class City(BaseModel):
    """A city."""

    name: str


def text(reply):
    return reply if isinstance(reply, str) else reply.content


@pytest.mark.quick
@BOTH
def test_every_option_of_decoding_is_a_field(kind):
    assert set(AdaFuseConfig.model_fields) <= set(kind.model_fields)
    assert all(kind.model_fields[name].default is None for name in AdaFuseConfig.model_fields)


@pytest.mark.quick
def test_a_call_overrides_options_of_the_model(model):
    said = {"max_words": 1, "max_tokens": 5, "top_k": 20, "model": "ink+quill"}
    short, whole = text(model.invoke("Hi", **said)), text(model.invoke("Hi"))
    assert whole.startswith(short)
    assert len(short) < len(whole)
    assert text(model.invoke("Hi", stop=[" day"])).endswith("Good")
    assert text(model.invoke("Hi", stop=" day")).endswith("Good")
    assert text(model.bind(stop=" day").invoke("Hi")).endswith("Good")
    assert text(model.bind(stop=" day").invoke("Hi", stop=[])) == whole
    assert text(model.invoke("Hi", use=["quill"])) == whole
    with pytest.raises(InvalidOptionError, match="use="):
        model.invoke("Hi", members=["quill"])


@BOTH
def test_other_names_of_options_are_fields(kind, obliging):
    model = kind(engine=obliging, num_predict=5)
    assert model.max_tokens == 5
    model.max_tokens = 2
    assert model.max_new_tokens == model.max_completion_tokens == 2
    assert model.model_copy(update={"stop_sequences": ["a"]}).stop == ["a"]
    longer = model.configurable_fields(max_tokens=ConfigurableField(id="most"))
    said = longer.with_config(configurable={"most": 4}).invoke("Hi")
    assert len(text(said)) > len(text(model.invoke("Hi")))


def test_bound_options_stay_when_tools_or_a_schema_are_bound(chat):
    bound = chat.bind(use=["quill"], enforce=False)
    agent: Any = create_agent(bound, [City])
    structured = bound.with_structured_output(City, include_raw=True)
    for reply in (
        bound.bind_tools([City]).invoke("Hi"),
        bound.bind(tools=[], max_words=1).invoke("Hi"),
        structured.invoke("Hi")["raw"],
        agent.invoke({"messages": "Hi"})["messages"][-1],
    ):
        assert reply.response_metadata["model_name"] == "quill"


@BOTH
def test_a_call_replaces_the_form_of_the_response(kind, obliging):
    pytest.importorskip("llguidance")
    schema = {"enum": ["Good", "Bad"]}
    for model in (kind(engine=obliging), kind(engine=obliging, regex="[0-9]{3}")):
        assert text(model.invoke("Hi", choices=["Good day", "Bad day"])) in ("Good day", "Bad day")
        assert text(model.invoke("Hi", json_schema=schema)) in ('"Good"', '"Bad"')
        assert text(model.invoke("Hi", json_schema=json.dumps(schema))) in ('"Good"', '"Bad"')
        assert text(model.invoke("Hi", grammar='start: "Hello" | "Bye"')) in ("Hello", "Bye")
    assert re.fullmatch("[0-9]{3}", text(model.invoke("Hi")))
    model = kind(members="embedded", json_schema=City)
    assert model.json_schema == {**City.model_json_schema(), "additionalProperties": False}
    assert pickle.loads(pickle.dumps(model)).asdict() == model.asdict()
    with pytest.raises(InvalidOptionError, match="only one of"):
        kind(engine=obliging).invoke("Hi", regex="a", choices=["a"])


@BOTH
def test_copies_pickles_and_dumps_are_the_same_model(kind, obliging):
    members = [
        "a/b",
        TransformersMember(path="c", weight=2.0, quantization_config={"bits": 4}),
        {"path": "d.gguf", "end_tokens": ["<|eom_id|>"]},
    ]
    model = kind(
        members=members,
        runtime=RuntimeConfig(max_requests=2),
        dtype="bfloat16",
        max_words=2,
        stop=["x"],
    )
    assert pickle.loads(pickle.dumps(model)).asdict() == model.asdict()
    assert copy.deepcopy(model).asdict() == model.asdict()
    allowed: dict[str, Any] = {"valid_namespaces": ["langchain_adafuse"], "allowed_objects": [kind]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading is in beta
        loaded = load(dumpd(model), **allowed), loads(dumps(model), **allowed)
    for again in loaded:
        assert isinstance(again, kind)
        assert again.asdict() == model.asdict()
        assert again.runtime == model.runtime
    shared = copy.deepcopy(kind(engine=obliging))
    assert shared.engine is obliging


@BOTH
def test_caches_tell_ensembles_options_and_prompts_apart(kind):
    class Counting(InMemoryCache):
        def __init__(self):
            super().__init__()
            self.keys = []

        def update(self, prompt, llm_string, return_val):
            self.keys.append((prompt, llm_string))
            super().update(prompt, llm_string, return_val)

    cache = Counting()
    with (
        scripted_engine(lambda prompt: "One two.") as one,
        scripted_engine(lambda p: "Two.") as two,
    ):
        first = kind(engine=one, cache=cache)
        assert text(first.invoke("Hi")) == text(first.invoke("Hi"))
        assert len(cache.keys) == 1
        assert text(kind(engine=two, cache=cache).invoke("Hi")) != text(first.invoke("Hi"))
        assert len(cache.keys) == 2
        variants: list[dict[str, Any]] = [
            {"max_new_tokens": 1},
            {"max_words": 1},
            {"stop": ["two"]},
            {"model": "ink"},
            {"temperature": 0.5, "seed": 1},
            {"temperature": 0.5, "seed": 2},
        ]
        for number, said in enumerate(variants, start=3):
            whole = text(first.invoke("Hi", **said))
            assert len(cache.keys) == number
            assert text(kind(engine=one, cache=cache, **said).invoke("Hi")) == whole
        assert text(first.invoke("Hi", stop=["two"])).strip() == "One"
    assert len(set(cache.keys)) == len(cache.keys)


@BOTH
def test_model_chooses_among_members_and_says_so_when_it_names_a_model(kind, obliging):
    with pytest.raises(ValueError, match=r"To load models, pass members=\['Qwen/Qwen3-8B'\]"):
        kind(model="Qwen/Qwen3-8B")
    for option in ("model", "use"):
        with pytest.raises(ValueError, match=rf"{option}=.*no member 'Qwen/Qwen3-8B'.*members="):
            kind(engine=obliging, **{option: "Qwen/Qwen3-8B"})
    with pytest.raises(ValueError, match="are the same option"):
        kind(engine=obliging, use="ink", model="quill")
    assert kind(engine=obliging, use=["quill"]).model_name == "quill"
    assert kind(engine=obliging, model="quill+ink").model_name == "ink+quill"
    both = kind(engine=obliging, model="quill")
    assert text(both.invoke("Hi", use="ink")) == text(kind(engine=obliging, use="ink").invoke("Hi"))


def test_the_output_of_a_chat_model_has_its_name_and_its_tokens(obliging):
    class Listening(BaseCallbackHandler):
        def __init__(self):
            self.outputs = []

        def on_llm_end(self, response, **kwargs):
            self.outputs.append(response.llm_output)

    chat = ChatAdaFuse(engine=obliging, cache=InMemoryCache())
    heard = Listening()
    batch: list[Any] = [[HumanMessage("Hi")], [HumanMessage("What is it?")]]
    result = chat.generate(batch, callbacks=[heard])
    usages = [row[0].message.response_metadata["token_usage"] for row in result.generations]  # type: ignore[union-attr]
    kinds = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert result.llm_output == {
        "model_name": "ink+quill",
        "token_usage": {kind: sum(usage[kind] for usage in usages) for kind in kinds},
    }
    assert [output["token_usage"] for output in heard.outputs] == usages
    again = chat.generate(batch).llm_output  # from the cache
    assert again is not None
    assert again["token_usage"] == dict.fromkeys(kinds, 0)
    alone = chat.generate(batch, model="quill").llm_output
    assert alone is not None
    assert alone["model_name"] == "quill"


@pytest.mark.quick
def test_a_chat_model_calls_tools_if_a_member_has_a_chat_template():
    for templates in itertools.product((CHATML, None), repeat=2):
        members = [
            scripted(lambda prompt: "Yes.", name=name, template=template)
            for name, template in zip("ab", templates, strict=True)
        ]
        with AdaFuseEngine(members) as engine:
            chat = ChatAdaFuse(engine=engine)
            assert chat.profile is not None
            assert chat.profile["tool_calling"] == any(templates)
            assert chat.profile["tool_choice"] == (any(templates) and is_available())
            assert chat.profile["structured_output"] == is_available()


@pytest.mark.quick
def test_members_without_a_chat_template_are_named_once(caplog):
    def plain(name):
        return FakeBackend(name, lambda text: {" on": 0.9, " off": 0.1})

    with AdaFuseEngine([plain("one"), plain("two")]) as engine:
        chat = ChatAdaFuse(engine=engine, max_new_tokens=2)
        chat.invoke("Go", model="two")
        list(chat.stream("Go", model="two"))
        assert [(each.levelname, each.name) for each in caplog.records] == [
            ("WARNING", "langchain_adafuse.chat_models")
        ]
        assert "without a chat template: two." in caplog.text
        chat.batch(["Go", "On"])
        assert "without a chat template: one, two." in caplog.text
        assert len(caplog.records) == 2
        ChatAdaFuse(engine=engine, max_new_tokens=2).invoke("Go", model="two")
        assert len(caplog.records) == 3
        AdaFuseLLM(engine=engine, max_new_tokens=2).invoke("Go")
        assert len(caplog.records) == 3
