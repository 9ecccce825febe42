"""Choices: texts that are scored instead of generated."""

from __future__ import annotations

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import InvalidInputError
from tests.support.scripted import scripted_engine


def judge(prompt: str) -> str:
    return "prices" if "cost" in prompt else "history"


@pytest.fixture(scope="module")
def llm():
    with scripted_engine(judge) as engine:
        yield AdaFuseLLM(engine=engine)


@pytest.mark.quick
async def test_the_likeliest_choice_and_all_probabilities(llm):
    asked = [ChatMessage("What does it cost?")]
    choice = llm.choose(asked, ["history", "prices", "weather"])
    assert (choice.text, choice.index) == ("prices", 1)
    assert sum(choice.probabilities) == pytest.approx(1)
    assert {*choice.nll} == {"ink", "quill"}
    assert (await llm.achoose(asked, ["history", "prices", "weather"])).nll == choice.nll
    turned = llm.choose(asked, ["weather", "prices", "history"])
    assert turned.probabilities == pytest.approx(choice.probabilities[::-1])
    as_text = llm.choose("What does it cost?", ["history", "prices", "weather"])
    assert as_text.nll == choice.nll
    alone = llm.choose(asked, ["history", "prices"], use=["ink"])
    assert {*alone.nll} == {"ink"}


async def test_a_choice_replaces_other_forms_of_the_llm(llm):
    shaped = AdaFuseLLM(engine=llm.engine, regex="x+", system_prompt="Be brief.")
    asked = [ChatMessage("What does it cost?")]
    assert shaped.choose(asked, ["history", "prices"]).text == "prices"
    for choices, message in [([], "choices"), (["a", "a"], "differ"), ("ab", "list")]:
        with pytest.raises(InvalidInputError, match=message):
            llm.choose(asked, choices)
        with pytest.raises(InvalidInputError, match=message):
            await llm.achoose(asked, choices)
    with pytest.raises(InvalidInputError, match="only one of"):
        llm.choose(asked, ["a"], regex="x")
