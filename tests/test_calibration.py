"""The confidence of a response in all interfaces, and calibrations that are refused."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from llama_index.core.llms import ChatMessage
from llama_index.llms.adafuse import AdaFuseLLM
from openai import OpenAI

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, InvalidOptionError, RemoteEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.report.styles import percent, summary
from adafuse_llm.serving import create_app
from adafuse_llm.strategies import AdaFuse
from langchain_adafuse import ChatAdaFuse
from tests.support.commands import adafuse
from tests.support.serving import served

KNOWN: dict[str, Any] = {
    "strategy": "adafuse",
    "members": {"one": 0.3, "two": -0.1},
    "logprob": 0.5,
    "agreement": 0.25,
    "length": -0.125,
    "intercept": 0.75,
}
TURNS = [{"role": "user", "content": "Hi"}]


def member(name: str, sure: float) -> FakeBackend:
    """A member that writes "ab cd", and is more or less sure of the second word and the end."""

    def likely(text: str) -> dict[str, float]:
        written = text[text.rfind("a") :] if "a" in text else ""
        following = "ab cd"[len(written) : len(written) + 1] or "<end>"
        chance = sure if len(written) > 1 else 0.9
        return {following: chance, "z": 1 - chance}

    return FakeBackend(name, likely, [*"abcdz "])


@pytest.fixture(scope="module")
def engine() -> Iterator[AdaFuseEngine]:
    members = [member("one", 0.9), member("two", 0.6)]
    config = AdaFuseConfig(max_words=1, calibration=KNOWN, max_new_tokens=12)
    with AdaFuseEngine(members, config) as made:
        yield made


def test_the_confidence_is_the_logistic_function_of_what_is_known(engine: AdaFuseEngine) -> None:
    done = engine.generate("Q:")
    one, two = (done.member_logprobs[name] for name in ("one", "two"))
    assert done.text == "ab cd"
    assert done.logprob is not None
    assert done.confidence is not None
    assert one == pytest.approx(6 * math.log(0.9))
    assert two == pytest.approx(2 * math.log(0.9) + 4 * math.log(0.6))
    assert done.logprob == pytest.approx((one + two) / 2)
    agreed = sum(len(each.candidates) == 1 for each in done.rounds) / len(done.rounds)
    assert 0 < agreed < 1
    total = 0.75 + 0.3 * one - 0.1 * two + 0.5 * done.logprob + 0.25 * agreed - 0.125 * len("ab cd")
    assert done.confidence == pytest.approx(1 / (1 + math.exp(-total)))
    batch = engine.generate_batch(["Q:", "P:"])
    (*_, last) = engine.stream("Q:")
    assert last.generation is not None
    for each in (batch[0], last.generation):
        assert (each.logprob, each.confidence) == (done.logprob, done.confidence)
    assert f"confidence {percent(done.confidence)}" in summary(done)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"strategy": "mixture"}, "mixture.*'adafuse'"),
        ({"members": {"one": 1.0, "three": 1.0}}, "one, three with.* one, two with"),
        ({"slope": 1.0}, "calibration"),
        ({"intercept": math.nan}, "calibration"),
        ({"logprob": 1e308}, "calibration"),
    ],
)
def test_a_calibration_of_another_ensemble_is_refused(
    engine: AdaFuseEngine, change: dict[str, Any], named: str
) -> None:
    wrong = {**KNOWN, **change}
    with pytest.raises(InvalidOptionError, match=named):
        engine.generate("Q:", calibration=wrong)
    with pytest.raises(InvalidOptionError, match=named):
        AdaFuseEngine(engine.backends, AdaFuseConfig(calibration=wrong))


class Other(AdaFuse):
    """The rule of the paper under another name."""

    name = "other"


def test_a_response_that_is_cut_or_of_others_has_no_confidence(engine: AdaFuseEngine) -> None:
    assert engine.generate("Q:", max_new_tokens=1).finish_reason == "length"
    assert engine.generate("Q:", max_new_tokens=1).confidence is None
    assert engine.generate("Q:", use="one").confidence is None
    assert engine.with_strategy(Other()).generate("Q:").confidence is None
    assert engine.with_strategy("adafuse").generate("Q:").confidence is not None
    assert engine.generate("Q:", calibration=None).confidence is None


def test_every_framework_and_the_server_tell_both(engine: AdaFuseEngine) -> None:
    expected = engine.generate(messages=TURNS)
    both = (expected.logprob, expected.confidence)
    assert None not in both
    chat = ChatAdaFuse(engine=engine)
    *_, chunk = chat.stream([HumanMessage("Hi")])
    assert chunk.response_metadata["confidence"] == both[1]
    told = chat.invoke([HumanMessage("Hi")]).response_metadata
    assert (told["logprob"], told["confidence"]) == both
    of_one = ChatAdaFuse(engine=engine, calibration=KNOWN).invoke("Hi", use="one")
    assert "confidence" not in of_one.response_metadata
    raw = AdaFuseLLM(engine=engine).chat([ChatMessage(content="Hi")]).raw
    assert (raw.logprob, raw.confidence) == both
    with served(create_app(engine)) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="x")
        given: Any = {"model": "adafuse", "messages": TURNS}
        extension = client.chat.completions.create(**given).choices[0].model_extra["adafuse"]
        *_, end = client.chat.completions.create(**given, stream=True)
        for each in (extension, end.model_extra["adafuse"]):
            assert (each["logprob"], each["confidence"]) == both
        with RemoteEngine(url) as remote:
            done = remote.generate(messages=TURNS)
            assert (done.logprob, done.confidence) == both
            assert done.member_logprobs == expected.member_logprobs


def test_a_configuration_file_brings_it_to_commands_and_models(tmp_path: Path) -> None:
    known = {**KNOWN, "members": {"heron": 0.1, "finch": 0.1}}
    path = tmp_path / "tuned.yaml"
    path.write_text(json.dumps({"use": ["heron", "finch"], "calibration": known}))
    asked = adafuse("ask", "What is 12 + 7?", "--config", path, "--json")
    assert 0 < json.loads(asked.stdout)["confidence"] < 1
    assert "confidence" in adafuse("ask", "What is 12 + 7?", "--config", path).stdout
    for kind in (ChatAdaFuse, AdaFuseLLM):
        model: Any = kind.from_config(path)
        assert model.calibration.members == known["members"]
