"""Fields, options of calls, and what is loaded when."""

import copy
import pickle
import re
import warnings
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumpd, load
from langchain_core.output_parsers import StrOutputParser
from pydantic import BaseModel

from adafuse_llm import AdaFuseEngine, InvalidOptionError, RuntimeConfig, TransformersMember
from adafuse_llm.grammar.matchers import is_available
from langchain_adafuse import AdaFuseLLM, ChatAdaFuse
from tests.support.models import CHATML
from tests.support.scripted import scripted, scripted_engine

text = StrOutputParser().invoke


class City(BaseModel):
    """A city."""

    name: str


@pytest.mark.quick
def test_a_call_overrides_options_of_the_model(model):
    said = {"max_words": 1, "max_tokens": 5, "top_k": 20, "model": "ink+quill"}
    short, whole = text(model.invoke("Hi", **said)), text(model.invoke("Hi"))
    assert whole.startswith(short)
    assert len(short) < len(whole)
    assert text(model.invoke("Hi", stop=[" day"])).endswith("Good")
    assert text(model.bind(stop=" day").invoke("Hi")).endswith("Good")
    assert text(model.bind(stop=" day").invoke("Hi", stop=[])) == whole
    assert text(model.invoke("Hi", use=["quill"])) == whole


def test_other_names_of_options_are_fields(kind, obliging):
    model = kind(engine=obliging, num_predict=5)
    model.max_tokens = 2
    assert model.max_new_tokens == model.max_completion_tokens == 2
    copied = model.model_copy(update={"max_tokens": 3, "stop": "x"})
    assert (copied.max_new_tokens, copied.stop) == (3, ("x",))
    assert kind(engine=obliging, model="quill+ink").model_name == "ink+quill"


def test_bound_options_stay_when_tools_or_a_schema_are_bound(chat):
    bound = chat.bind(use=["quill"], enforce=False)
    agent: Any = create_agent(bound, [City])
    for reply in (
        bound.bind_tools([City]).invoke("Hi"),
        bound.bind(tools=[], max_words=1).invoke("Hi"),
        bound.with_structured_output(City, include_raw=True).invoke("Hi")["raw"],
        agent.invoke({"messages": "Hi"})["messages"][-1],
    ):
        assert reply.response_metadata["model_name"] == "quill"


def test_a_bound_choice_of_tools_stays_in_an_agent(chat):
    one = chat.bind(tool_choice="City", parallel_tool_calls=False, max_tokens=40)
    agent: Any = create_agent(one, [City], interrupt_before=["tools"])
    message = agent.invoke({"messages": "Hi"})["messages"][-1]
    (call,) = message.tool_calls + message.invalid_tool_calls
    assert "City" in str(call)


def test_a_call_replaces_the_form_of_the_response(obliging):
    chat = ChatAdaFuse(engine=obliging, regex="[0-9]{3}")
    assert re.fullmatch("[0-9]{3}", text(chat.invoke("Hi")))
    assert text(chat.invoke("Hi", json_schema='{"enum": ["Good"]}')) == '"Good"'
    chat = ChatAdaFuse(members="embedded", json_schema=City)
    assert chat.json_schema == {**City.model_json_schema(), "additionalProperties": False}


def test_copies_pickles_and_dumps_are_the_same_model(kind, obliging):
    members = [
        "a/b",
        TransformersMember(path="c", weight=2.0, quantization_config={"bits": 4}),
        {"path": "d.gguf", "threads": 2},
    ]
    runtime = RuntimeConfig(max_requests=2)
    model = kind(members=members, runtime=runtime, dtype="bfloat16", max_words=2, stop=["x"])
    allowed: dict[str, Any] = {"valid_namespaces": ["langchain_adafuse"], "allowed_objects": [kind]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading is in beta
        loaded = load(dumpd(model), **allowed)
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), loaded):
        assert isinstance(again, kind)
        assert again.asdict() == model.asdict()
        assert again.runtime == runtime
    assert copy.deepcopy(kind(engine=obliging)).engine is obliging


def test_a_field_of_the_ensemble_that_changes_is_obeyed(kind, obliging):
    model, given = kind(members="embedded"), kind(engine=obliging)
    copied = model.model_copy(update={"strategy": "mixture"})
    model.strategy = given.strategy = "single"
    found = [each._identifying_params["ensemble"]["strategy"] for each in (model, copied)]
    assert found == ["single", "mixture"]
    with pytest.raises(InvalidOptionError, match="with_strategy"):
        given.invoke("Hi")


def test_caches_tell_ensembles_options_and_prompts_apart(kind, obliging):
    cache = InMemoryCache()
    model = kind(engine=obliging, cache=cache)
    with scripted_engine(lambda prompt: "Two.") as engine:
        kind(engine=engine, cache=cache).invoke("Hi")
    drawn = {"temperature": 0.5, "seed": 1}
    variants: list[dict[str, Any]] = [
        *({}, {"max_new_tokens": 1}, {"stop": ["day"]}, {"model": "ink"}),
        *(drawn, {**drawn, "seed": 2}, {**drawn, "n": 2}),
    ]
    for said in variants:
        assert text(model.invoke("Hi", **said)) == text(model.invoke("Hi", **said))
    model.invoke("Hello")
    assert len(cache._cache) == 2 + len(variants)


@pytest.mark.quick
@pytest.mark.parametrize("templates", [(CHATML, None), (None, None)])
def test_abilities_and_a_warning_follow_from_the_chat_templates(templates, caplog):
    members = [
        scripted(lambda prompt: "Yes.", name=name, template=template)
        for name, template in zip("ab", templates, strict=True)
    ]
    with AdaFuseEngine(members) as engine:
        chat = ChatAdaFuse(engine=engine, max_new_tokens=2)
        chat.profile = {}  # as of members whose files are not here
        profile = chat.warmup().profile or {}
        assert profile["tool_calling"] == any(templates)
        assert profile["tool_choice"] == (any(templates) and is_available())
        assert profile["structured_output"] == is_available()
        assert profile["max_input_tokens"] == 8192
        own = ChatAdaFuse(engine=engine, profile={"max_input_tokens": 9})
        assert own.warmup().profile == {"max_input_tokens": 9}
        caplog.clear()
        for _ in range(2):
            chat.invoke("Go", use=["b"])
        AdaFuseLLM(engine=engine, max_new_tokens=2).invoke("Go")
        logged = [each for each in caplog.records if each.name.startswith("langchain_adafuse")]
        assert ["template: b." in each.message for each in logged] == [True] * (
            templates[1] is None
        )
