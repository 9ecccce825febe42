"""Choices: texts that are scored instead of generated, for selectors and judges."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.evaluation import EvaluationResult
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CustomQueryEngine, RouterQueryEngine
from llama_index.core.tools import QueryEngineTool, ToolMetadata
from llama_index.llms.adafuse import (
    AdaFuseFaithfulnessEvaluator,
    AdaFuseLLM,
    AdaFuseLLMError,
    AdaFuseSelector,
)

from adafuse_llm import AdaFuseEngine, InvalidInputError
from tests.support.scripted import scripted, scripted_engine

MILL = "The Silesse Mill was founded by Jenbert Zalwyn."


def judge(prompt: str) -> str:
    """Routes questions about prices, and supports what is said of Jenbert."""
    question = prompt.rpartition("Question:")[2] or prompt
    if "Statement:" in prompt:
        statement = prompt.rpartition("Statement:")[2]
        return (
            "YES" if "Jenbert" in statement and "Jenbert" in prompt.partition("State")[0] else "NO"
        )
    if "1: " in prompt:
        return "2" if "cost" in question else "1"
    return "prices" if "cost" in question else "history"


@pytest.fixture(scope="module")
def llm():
    with scripted_engine(judge) as engine:
        yield AdaFuseLLM(engine=engine)


NAMED = [
    ToolMetadata(name="history", description="Who did what,\nand when"),
    ToolMetadata(name="prices", description="What things cost"),
    ToolMetadata(name="weather", description="Rain"),
]
UNNAMED = [each.description for each in NAMED]


# choose -----------------------------------------------------------------------------------------


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
    for choices, message in [([], "choices"), (["a", "a"], "differ"), ("ab", "list of texts")]:
        with pytest.raises(AdaFuseLLMError, match=message):
            llm.choose(asked, choices)
        with pytest.raises(AdaFuseLLMError, match=message):
            await llm.achoose(asked, choices)
    with pytest.raises(AdaFuseLLMError, match="only one of"):
        llm.choose(asked, ["a"], regex="x")


# The selector -----------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [NAMED, UNNAMED], ids=["named", "numbered"])
async def test_a_selector(llm, choices):
    selector = AdaFuseSelector.from_defaults(llm)
    for question, index in [("What does it cost?", 1), ("Who did it?", 0)]:
        result: Any = selector.select(choices, question)
        assert result.ind == index
        assert sum(result.probabilities) == pytest.approx(1)
        assert result.selections[0].probability == max(result.probabilities)
        assert f"{max(result.probabilities):.3f}" in result.reason
        assert await selector.aselect(choices, question) == result


def test_several_selections(llm):
    result: Any = AdaFuseSelector(llm, max_outputs=2).select(NAMED, "What does it cost?")
    assert result.inds[0] == 1
    probabilities = [each.probability for each in result.selections]
    assert probabilities == sorted(result.probabilities, reverse=True)[:2]
    result = AdaFuseSelector(llm, max_outputs=9).select(NAMED, "What does it cost?")
    assert sorted(result.inds) == [0, 1, 2]


def test_a_prompt_of_ones_own():
    seen: list[str] = []

    def script(prompt: str) -> str:
        seen.append(prompt)
        return "history"

    with AdaFuseEngine([scripted(script)]) as engine:
        selector = AdaFuseSelector.from_defaults(
            AdaFuseLLM(engine=engine), "{query_str} Of {choices}?\nAnswer: "
        )
        selector.select(NAMED, "Which?")
        lines = "history: Who did what, and when\nprices: What things cost\nweather: Rain"
        assert any(f"Which? Of {lines}?" in text for text in seen)
        selector.update_prompts({"prompt": PromptTemplate("{choices} {query_str}!\nAnswer: ")})
        selector.select(NAMED, "Which?")
    assert any("Rain Which?!" in text for text in seen)


class Says(CustomQueryEngine):
    text: str

    def custom_query(self, query_str: str) -> str:
        return self.text


async def test_a_router(llm):
    tools = [
        QueryEngineTool.from_defaults(Says(text=each.name or ""), description=each.description)
        for each in NAMED
    ]
    router = RouterQueryEngine(AdaFuseSelector(llm), tools, llm=llm)
    response = router.query("What does it cost?")
    assert str(response) == "prices"
    assert response.metadata is not None
    assert response.metadata["selector_result"].probabilities[1] > 0.5
    assert str(await router.aquery("Who did it?")) == "history"


@pytest.mark.quick
def test_what_cannot_be_selected_or_judged(llm):
    other: Any = MockLLM()
    for kind in (AdaFuseSelector, AdaFuseFaithfulnessEvaluator):
        with pytest.raises(InvalidInputError, match=r"must be an AdaFuseLLM.*got MockLLM"):
            kind(other)
    with pytest.raises(InvalidInputError, match="max_outputs must be at least 1; got 0"):
        AdaFuseSelector(llm, max_outputs=0)
    with pytest.raises(InvalidInputError, match="threshold must be from 0 to 1; got 2"):
        AdaFuseFaithfulnessEvaluator(llm, threshold=2)
    with pytest.raises(AdaFuseLLMError, match="at least one choice"):
        AdaFuseSelector(llm).select([], "Which?")
    with pytest.raises(AdaFuseLLMError, match="pass response="):
        AdaFuseFaithfulnessEvaluator(llm).evaluate(response="It is.")


# The judge --------------------------------------------------------------------------------------


async def test_a_judge_of_faithfulness(llm):
    evaluator = AdaFuseFaithfulnessEvaluator(llm)
    result = evaluator.evaluate("Who?", "Jenbert Zalwyn did.", [MILL])
    assert isinstance(result, EvaluationResult)
    assert (result.passing, result.feedback, result.query) == (True, "YES", "Who?")
    assert result.score is not None
    assert result.score > 0.5
    other = await evaluator.aevaluate("Who?", "Orrin did.", [MILL])
    assert (other.passing, other.feedback) == (False, "NO")
    assert other.score is not None
    assert other.score < 0.5
    assert AdaFuseFaithfulnessEvaluator(llm, threshold=0).evaluate("", "Orrin.", [MILL]).passing
    with pytest.raises(AdaFuseLLMError, match="do not support the response"):
        AdaFuseFaithfulnessEvaluator(llm, raise_error=True).evaluate("", "Orrin.", [MILL])


def test_contexts_that_do_not_fit_one_prompt(llm):
    with scripted_engine(judge, window=700) as engine:
        small = AdaFuseLLM(engine=engine, max_new_tokens=8)
        evaluator = AdaFuseFaithfulnessEvaluator(small)
        other = [f"Fact {number}: it rained in the valley that day." for number in range(40)]
        assert len(evaluator._prompts("Jenbert did.", [*other, MILL])) > 1
        assert evaluator.evaluate("", "Jenbert did.", [*other, MILL, *other]).passing
        assert not evaluator.evaluate("", "Jenbert did.", other).passing


def test_a_template_of_ones_own(llm):
    template = "State: {context_str}\nStatement: {query_str}\nAnswer: "
    evaluator = AdaFuseFaithfulnessEvaluator(llm, eval_template=template)
    assert evaluator.get_prompts()["eval_template"].get_template() == template
    evaluator.update_prompts({"eval_template": PromptTemplate(f"{template}")})
    assert evaluator.evaluate("", "Orrin.", [MILL]).feedback == "NO"
