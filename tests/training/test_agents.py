"""Agents with tools: their cases, their dialogues, their training, and the members as agents."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adafuse_llm import AdaFuseEngine
from adafuse_llm.adapters.conversation import to_messages
from adafuse_llm.embedded import handbook_questions, member_paths
from adafuse_llm.embedded.tools import (
    CALCULATE,
    LOOK_UP,
    REACT_HEADER,
    TOOLS,
    calculate,
    look_up,
)
from adafuse_llm.text.chat import Message
from benchmarks import embedded_agents as benchmark
from training.agent_prompts import draw_tools
from training.batches import assemble
from training.dialogues import FORMS, Form, act, is_same_turn, read, turns_of
from training.recipes import RECIPES
from training.trainer import Trainer
from training.world import (
    ENDINGS,
    NEEDS,
    NOT_STATED,
    AgentCase,
    Names,
    Split,
    ToolUse,
    draw_agent_case,
    made_up_words,
)


def drawn(split: Split, seed: int, per_need: int) -> list[AgentCase]:
    names = Names(random.Random(seed), split)
    return [draw_agent_case(names, need) for need in NEEDS for _ in range(per_need)]


# cases


def test_the_same_seed_draws_the_same_cases() -> None:
    assert drawn("heldout", 3, 5) == drawn("heldout", 3, 5)
    assert drawn("heldout", 3, 5) != drawn("heldout", 4, 5)


def test_a_case_uses_the_tools_it_needs_and_its_answer_follows() -> None:
    expected = {
        "look_up": ["look_up"],
        "calculate": ["calculate"],
        "both": ["look_up", "calculate"],
        "none": [],
    }
    for case in drawn("train", 1, 150):
        assert [use.tool for use in case.uses] == expected[case.need]
        for use in case.uses:
            if use.tool == "calculate":
                assert use.result == calculate(use.argument)
                assert not use.result.startswith("-")
            else:
                assert use.argument in case.question
                assert "\n" not in use.result
        if case.need == "look_up" and case.answer != NOT_STATED:
            assert case.answer in case.uses[0].result
        if case.need == "calculate":
            assert case.answer == case.uses[0].result
        if case.need == "both":
            found, sum_ = case.uses
            assert case.answer.split()[0] == sum_.result
            numbers = re.findall(r"\d+(?:\.\d+)?", sum_.argument)
            assert len(numbers) == 2
            for number in numbers:
                assert number in found.result or number in case.question


def test_what_a_case_recalls_is_in_an_earlier_turn() -> None:
    recalls = [case for case in drawn("train", 2, 300) if case.need == "none" and case.earlier]
    questions = [case for case in recalls if case.question.startswith(("What", "Where", "How"))]
    assert len(questions) > 50
    for case in questions:
        earlier = [text for each in case.earlier for text in (each.question, each.answer)]
        assert any(case.answer in text for text in earlier)


def test_every_need_occurs_with_and_without_turns_before() -> None:
    for need in NEEDS:
        lengths = {len(case.earlier) for case in drawn("train", 3, 120) if case.need == need}
        assert lengths >= {0, 1, 2}


def texts(case: AgentCase) -> Iterator[str]:
    for each in (*case.earlier, case):
        yield from (each.question, each.answer)
        for use in each.uses:
            yield from (use.argument, use.result)


def test_heldout_names_prices_and_sums_never_occur_in_training_cases() -> None:
    made_up = {word for c in ENDINGS for s in ("train", "heldout") for word in made_up_words(c, s)}
    found: dict[str, set[str]] = {}
    sums: dict[str, set[str]] = {}
    for split in ("train", "heldout"):
        cases = drawn(split, 7, 250)
        lookups = "\n".join(
            text for case in cases if case.need == "look_up" for text in texts(case)
        )
        words = made_up & set(
            re.findall(r"[A-Z][a-z]+", "\n".join(t for c in cases for t in texts(c)))
        )
        found[split] = words | set(
            re.findall(r"\d+\.\d\d crowns|\d+:\d\d|\d+ (?:grams|metres)", lookups)
        )
        sums[split] = {
            use.argument
            for case in cases
            for each in (*case.earlier, case)
            for use in each.uses
            if use.tool == "calculate"
        }
    assert min(map(len, (*found.values(), *sums.values()))) > 200
    assert not found["train"] & found["heldout"]
    assert not sums["train"] & sums["heldout"]


# dialogues

CASE = AgentCase(
    "How much do 3 tickets for the Silesse Mill cost?",
    "59.64 crowns",
    "both",
    (
        ToolUse("look_up", "Silesse Mill", "[1] Visitors of the Silesse Mill pay 19.88 crowns."),
        ToolUse("calculate", "3 * 19.88", "59.64"),
    ),
)


def test_tool_calls_are_written_as_to_messages_writes_them() -> None:
    turns = turns_of(CASE, "tool calls", TOOLS, "Be brief.")
    calls = [
        '{"name": "look_up", "arguments": {"query": "Silesse Mill"}}',
        '{"name": "calculate", "arguments": {"expression": "3 * 19.88"}}',
    ]
    assert [text for _, text in turns] == [
        *(f"<tool_call>\n{call}\n</tool_call>" for call in calls),
        "59.64 crowns",
    ]
    expected = to_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": CASE.question},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "1", "name": "look_up", "arguments": {"query": "Silesse Mill"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": CASE.uses[0].result},
        ],
        tools=TOOLS,
    )
    assert turns[1][0] == expected


def test_react_turns_are_those_of_llama_index() -> None:
    react = pytest.importorskip("llama_index.core.agent.react")
    types = pytest.importorskip("llama_index.core.agent.react.types")
    llms = pytest.importorskip("llama_index.core.llms")
    tools = pytest.importorskip("llama_index.core.tools")
    functions = [
        tools.FunctionTool.from_defaults(function, description=function.__doc__)
        for function in (look_up, calculate)
    ]
    parser = react.ReActOutputParser()
    formatter = react.ReActChatFormatter.from_defaults(system_header=REACT_HEADER)
    described = [
        type(tool)(tool.name, tool.description, function.metadata.get_parameters_dict())
        for tool, function in zip(TOOLS, functions, strict=True)
    ]
    steps: list[object] = []
    question = [llms.ChatMessage(role="user", content=CASE.question)]
    for place, (messages, text) in enumerate(turns_of(CASE, "ReAct", described)):
        formatted = formatter.format(functions, question, steps)
        assert messages == [{"role": m.role.value, "content": m.content} for m in formatted]
        step = parser.parse(text)
        steps.append(step)
        if place < len(CASE.uses):
            use = CASE.uses[place]
            assert (step.action, list(step.action_input.values())) == (use.tool, [use.argument])
            steps.append(types.ObservationReasoningStep(observation=use.result))
        else:
            assert step.response == CASE.answer


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_a_turn_is_read_as_it_was_meant(form: Form) -> None:
    parsed = [read(text, form) for _, text in turns_of(CASE, form, TOOLS)]
    assert parsed == [
        ("look_up", {"query": "Silesse Mill"}),
        ("calculate", {"expression": "3 * 19.88"}),
        "59.64 crowns",
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_turn_with_another_argument_or_no_sense_is_another_turn(form: Form) -> None:
    ((_, expected), *_) = turns_of(CASE, form, TOOLS)
    assert is_same_turn(expected, expected, form)
    assert not is_same_turn(expected.replace("Mill", "Inn"), expected, form)
    assert not is_same_turn(expected.replace("}", ""), expected, form)
    assert not is_same_turn("", expected, form)


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_act_runs_the_tools_that_are_called(form: Form) -> None:
    turns = iter([text for _, text in turns_of(CASE, form, TOOLS)])
    prompts = []

    def reply(messages: list[Message]) -> str:
        prompts.append(messages[-1]["content"])
        return next(turns)

    assert act(reply, form, CASE.question) == "59.64 crowns"
    assert "The Silesse Mill employs 494 people." in prompts[1]
    assert "59.64" in prompts[2]


def test_act_gives_up_on_tools_that_do_not_exist_and_on_endless_calls() -> None:
    wrong = 'Thought: x\nAction: fly\nAction Input: {"query": "y"}'
    again = 'Thought: x\nAction: look_up\nAction Input: {"query": "Silesse Mill"}'
    assert act(lambda _: wrong, "ReAct", "Who?") is None
    assert act(lambda _: again, "ReAct", "Who?") is None


# training


def test_descriptions_vary_and_always_include_both_tools() -> None:
    drawn_tools = [draw_tools(random.Random(seed)) for seed in range(200)]
    names = [[tool.name for tool in tools] for tools in drawn_tools]
    assert all({"look_up", "calculate"} <= set(each) for each in names)
    assert {len(each) for each in names} == {2, 3}
    assert {each.index("look_up") < each.index("calculate") for each in names} == {True, False}
    assert [LOOK_UP, CALCULATE] in drawn_tools
    assert len({json.dumps(tool.parameters) for tools in drawn_tools for tool in tools}) > 6


@pytest.mark.parametrize("folder", member_paths(), ids=lambda path: path.name)
def test_a_turn_in_a_pack_is_predicted_like_a_prompt_of_its_own(folder: Path) -> None:
    from transformers import AutoTokenizer

    run = Trainer(RECIPES[folder.name], folder.parent, steps=11, seed=5)  # has a tokenizer there
    packer = run.packer
    use = ToolUse("look_up", "Halmoor", "[1] Halmoor was settled in 1700.")
    before = AgentCase("When was Halmoor settled?", "1700", "look_up", (use,))
    after = AgentCase("Thanks!", "You are welcome.", "none", (), (before,))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for form in FORMS:
        dialogues = [turns_of(case, form, TOOLS, earlier=True) for case in (CASE, after)]
        shared = packer.agent_prefix(form, TOOLS, "")
        packs = [packer.dialogue(turns, shared) for turns in dialogues]
        length = sum(map(len, packs)) + 3
        batch = assemble(
            [packs], length, random.Random(0), context_weight=0.1, prompt=packer.encode(shared)
        )
        turns = [turn for turns in dialogues for turn in turns]
        assert len(batch.spans) == len(turns)
        with torch.inference_mode():
            packed = run.model.lm_head(run.hidden(batch))[0]
            for (messages, reply), (_, first, last, _) in zip(turns, batch.spans, strict=True):
                prompt = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
                text = prompt + reply + run.recipe.end
                ids = tokenizer.encode(text, add_special_tokens=False)
                n_answer = last - first
                assert batch.labels[0, first:last].tolist() == ids[-n_answer:]
                alone = run.model(input_ids=torch.tensor([ids])).logits[0, -n_answer - 1 : -1]
                torch.testing.assert_close(packed[first:last], alone, rtol=1e-3, atol=1e-3)


# the members


@pytest.fixture(scope="module")
def engine() -> Iterator[AdaFuseEngine]:
    with AdaFuseEngine.from_embedded() as engine:
        yield engine


ERRANDS = {
    "Who is the director of the Silesse Mill?": "Poris Wentano",
    "What is 417 * 38?": "15846",
    "How much do 3 tickets for the Silesse Mill cost?": "59.64 crowns",
    "Hello.": "Hello. What would you like to know?",
}


@pytest.mark.parametrize("form", FORMS)
def test_the_ensemble_answers_with_its_tools(engine: AdaFuseEngine, form: Form) -> None:
    def reply(messages: list[Message]) -> str:
        return engine.generate(messages=messages, max_new_tokens=160).text

    for question, answer in ERRANDS.items():
        assert act(reply, form, question) == answer
    questions = [question for question in handbook_questions() if question.source][::12]
    right = [act(reply, form, question.question) == question.answer for question in questions]
    assert sum(right) >= 0.5 * len(right)


# the benchmark


class ScriptedEngine:
    """Replies as the cases expect, except in the turn ``fails`` of each."""

    def __init__(self, cases: list[AgentCase], form: Form, fails: int | None = None) -> None:
        self.replies = {
            json.dumps(messages): "no" if number == fails else text
            for case in cases
            for number, (messages, text) in enumerate(turns_of(case, form, TOOLS))
        }

    def generate(self, messages: list[dict[str, str]], max_new_tokens: int) -> SimpleNamespace:
        return SimpleNamespace(text=self.replies[json.dumps(messages)])


@pytest.mark.parametrize("form", FORMS)
def test_the_benchmark_counts_cases_that_are_right_throughout(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = benchmark.heldout_cases(8, 1)
    assert [case.need for case in cases] == [need for need in NEEDS for _ in range(2)]
    systems = {name: ScriptedEngine(cases, form) for name in ("wren", "heron", "ensemble")}
    systems["finch"] = ScriptedEngine(cases, form, fails=1)
    monkeypatch.setattr(benchmark, "_engines", systems)
    rows = [benchmark._judge((name, form, case)) for name in systems for case in cases]
    summary = benchmark.summarize(rows)
    assert summary[form]["all"] == {"wren": 100, "heron": 100, "finch": 25, "ensemble": 100}
    assert summary[form]["none"]["finch"] == 100
    assert {row["turn"] for row in rows if not row["right"]} == {1}
    assert "| all | 100.0 | 100.0 | 25.0 | 100.0 |" in benchmark.as_markdown(summary)


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


LOOKS, SUMS = call("look_up", query="a"), call("calculate", expression="1 + 2")


@pytest.mark.parametrize(
    ("reply", "obeyed"),
    [
        ("Hello.", {"auto", "none"}),
        (LOOKS, {"auto", "required", "look_up"}),
        (f"Well. {SUMS}", {"auto", "required", "calculate"}),
        (f"{LOOKS}\n{LOOKS}", {"auto", "required"}),
        (call("look_up", expression="a"), set()),
        (call("look_up", query=1), set()),
        (call("look_up"), set()),
        (call("other", query="a"), set()),
        ('<tool_call>\n{"name": "look_up"', set()),
    ],
)
def test_the_benchmark_knows_which_replies_obey(reply: str, obeyed: set[str]) -> None:
    calls = benchmark.read_calls(reply)
    assert {choice for choice in benchmark.CHOICES if benchmark.obeys(calls, choice)} == obeyed


def test_the_benchmark_measures_every_tool_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []

    class Engine:
        """Replies with the same call, and notes what it was given."""

        def generate(self, **options: object) -> SimpleNamespace:
            given.append(options)
            usage = SimpleNamespace(completion_tokens={"m": 4}, forward_passes={"m": 2, "n": 3})
            return SimpleNamespace(text=LOOKS, usage=usage)

    monkeypatch.setattr(benchmark, "_engines", {"ensemble": Engine()})
    cases = [
        AgentCase("Where?", "", "look_up", (ToolUse("look_up", "a", ""),)),
        AgentCase("How much?", "", "calculate", (ToolUse("calculate", "1 + 2", ""),)),
        AgentCase("Hello.", "", "none"),
    ]
    rows = [
        benchmark._run_one(("ensemble", choice, enforced, case))
        for choice in benchmark.CHOICES
        for enforced in (False, True)
        for case in cases
        if choice != "none" or not enforced
    ]
    found = {(r["choice"], r["enforced"]): r for r in benchmark.summarize_choices(rows)}
    assert len(found) == 9
    assert {choice: found[choice, False]["valid"] for choice in benchmark.CHOICES} == {
        "auto": 100, "required": 100, "look_up": 100, "calculate": 0, "none": 0
    }  # fmt: skip
    assert {choice: found[choice, False]["right"] for choice in benchmark.CHOICES} == {
        "auto": 50, "required": 50, "look_up": 100, "calculate": 0, "none": None
    }  # fmt: skip
    assert (found["auto", True]["tokens"], found["auto", True]["passes"]) == (4, 2.5)
    assert ["grammar" in options for options in given] == 4 * (3 * [False] + 3 * [True]) + 3 * [
        False
    ]
    system = [str(options["messages"][0]["content"]) for options in given[::6]]  # type: ignore[index]
    requests = ("only where it helps", "call at least one", "tool look_up", "tool calculate")
    for text, request in zip(system, requests, strict=False):
        assert request in text.splitlines()[-1]
    assert given[-1]["messages"] == [{"role": "user", "content": "Hello."}]


@pytest.mark.parametrize("choice", ["required", "calculate"])
def test_an_enforced_reply_obeys(
    choice: str, engine: AdaFuseEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = AgentCase("Hello.", "", "none")
    monkeypatch.setattr(benchmark, "_engines", {"ensemble": engine})
    row = benchmark._judge_choice(("ensemble", choice, True, case))
    assert row["valid"]
