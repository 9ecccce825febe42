"""Responses of members that reason, and responses that continue a message."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from adafuse_llm.adapters.reply import ReplyReader
from adafuse_llm.adapters.tool_grammar import tool_grammar
from adafuse_llm.text.conversation import Tool
from adafuse_llm.text.reasoning import open_reasoning, split_reasoning
from tests.support.thinkers import continuing, thinkers

ASKED = [{"role": "user", "content": "The capital?"}]
SECRET = "secret</think>\n\nParis."


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "prefix", "reasoning", "answer"),
    [
        ("Paris.", "", "", "Paris."),
        (" Paris. ", "", "", " Paris. "),
        (SECRET, "<think>\n", "secret", "Paris."),
        (SECRET, "", "", SECRET),
        ("<think>\nsecret\n</think>\n\nParis. ", "", "secret", "Paris. "),
        ("\n<think>a</think> <think>b</think>c", "", "a\n\nb", "c"),
        ("<think>so", "", "so", ""),
        ("so", "<think>\n", "so", ""),
        ("", "<think>\n", "", ""),
        ("a <think>b</think>", "", "", "a <think>b</think>"),
    ],
)
def test_reasoning_and_answer_are_told_apart(
    text: str, prefix: str, reasoning: str, answer: str
) -> None:
    assert split_reasoning(text, prefix) == (reasoning, answer)
    for size in (1, 3, 100):
        reader = ReplyReader()
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        deltas = [reader.add(piece, prefix) for piece in pieces]
        end: Any = SimpleNamespace(finish_reason="stop", cut_by="")
        deltas.append(reader.add("", prefix, end))
        assert "".join(delta.content for delta in deltas).strip() == answer.strip()
        thought = "".join(delta.reasoning for delta in deltas)
        assert "".join(thought.split()) == "".join(reasoning.split())


@pytest.mark.quick
def test_only_reasoning_that_is_not_closed_is_open() -> None:
    assert open_reasoning("a<think>b</think><think>\n") == "<think>\n"
    assert open_reasoning("a<think>b</think>\n") == ""
    assert open_reasoning("a") == ""


async def test_a_reply_that_begins_in_reasoning_says_so() -> None:
    engine = thinkers("deepseek", "deepseek-2", script=lambda _: SECRET)
    generation = engine.generate(messages=ASKED)
    assert (generation.text, generation.reply_prefix) == (SECRET, "<think>\n")
    assert (generation.reasoning, generation.answer) == ("secret", "Paris.")
    events = [event async for event in engine.astream(messages=ASKED)]
    assert {event.reply_prefix for event in events} == {"<think>\n"}
    assert events[-1].generation is not None
    assert events[-1].generation.answer == "Paris."
    assert json.loads(generation.model_dump_json())["reply_prefix"] == "<think>\n"
    several = engine.generate(messages=ASKED, temperature=1.0, n=2)
    assert [each.reply_prefix for each in several.alternatives] == ["<think>\n"]
    plain = engine.generate("The capital? Answer:")
    assert plain.reply_prefix == plain.reasoning == ""


def test_a_grammar_of_calls_goes_on_after_the_prefix() -> None:
    pytest.importorskip("llguidance")
    add = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "number"}}})
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    reply = f"Not <tool_call> yet.</think>\n{call}"
    engine = thinkers("deepseek", script=lambda _: reply)
    generation = engine.generate(messages=ASKED, tools=[add], grammar=tool_grammar([add]))
    assert generation.reasoning == "Not <tool_call> yet."
    assert generation.answer == call


# Continued messages -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begun", "left"),
    [
        ("The keeper of", " the light is Anna."),
        ("The keeper of ", "the light is Anna."),
        ("The kee", "per of the light is Anna."),
    ],
)
def test_a_response_continues_the_last_message(begun: str, left: str) -> None:
    engine = continuing("bytelevel", "sentencepiece", "bytelevel")
    messages = [*ASKED, {"role": "assistant", "content": begun}]
    assert engine.generate(messages=messages).text == left
    events = list(engine.stream(messages=messages))
    assert "".join(event.text for event in events) == left
    assert "".join(played.text for played in events[-1].generation.rounds) == left  # type: ignore[union-attr]


def test_choices_grammars_and_scores_continue_the_last_message() -> None:
    engine = continuing("bytelevel", "sentencepiece")
    messages = [*ASKED, {"role": "assistant", "content": "The keeper of the light is"}]
    choice = engine.choose(messages=messages, choices=[" Bea.", " Anna."])
    assert choice.text == " Anna."
    scores = engine.score(messages=messages, continuations=[" Bea.", " Anna."], ends=True)
    assert scores.texts[1].loglikelihood > scores.texts[0].loglikelihood  # type: ignore[operator]
    spaced = [*ASKED, {"role": "assistant", "content": "The keeper of the light is "}]
    assert engine.choose(messages=spaced, choices=["Bea.", "Anna."]).nll == choice.nll
    for name, values in choice.nll.items():
        text = scores.texts[1]
        assert values[1] == pytest.approx(text.nll[name] * text.tokens[name])
    pytest.importorskip("llguidance")
    assert engine.generate(messages=messages, regex=r" [A-Z][a-z]+\.").text == " Anna."
