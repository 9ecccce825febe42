"""Tools: what agents, programs and selectors of LlamaIndex do with the LLM."""

import json
from typing import Any

import pytest
from llama_index.core.agent.react import ReActChatFormatter
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage, ThinkingBlock, ToolCallBlock
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import WorkflowRuntimeError
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import AdaFuseEngine, MalformedReplyError
from tests.support.instruction_follower import call as written_call
from tests.support.llama_calls import ask
from tests.support.scripted import scripted, scripted_engine


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def greet(name: str, formal: bool = False) -> str:
    """Greet somebody."""
    return f"Good day, {name}." if formal else f"Hi {name}!"


ADD, GREET = FunctionTool.from_defaults(add), FunctionTool.from_defaults(greet)
SUM = written_call("add", a=12, b=7)
HELLO = written_call("greet", name="Zoë", formal=True)
CALLS = [("add", {"a": 12, "b": 7}), ("greet", {"name": "Zoë", "formal": True})]
STEP = 'Thought: I have to add.\nAction: add\nAction Input: {"a": 12, "b": 7}'
MADE_UP = "\nObservation: 42\nThought: I can answer.\nAnswer: It is 42."


def clerk(prompt: str) -> str:
    """A script that calls tools once, or only writes text."""
    if "Action Input:" in prompt:
        return "Thought: Done.\nAnswer: It is 19." if "tion: 19" in prompt else STEP + MADE_UP
    if '<tool_response>\n{"name"' in prompt:
        return "It is 19."
    if "Do both" in prompt:
        return f"<think>Hm.</think>\nLet me see.\n{SUM}\n{HELLO}"
    return SUM if "12 plus 7" in prompt else "I only add."


@pytest.fixture(scope="module")
def llm():
    with scripted_engine(clerk) as engine:
        yield AdaFuseLLM(engine=engine)


@pytest.fixture(scope="module")
def free(llm):
    """An LLM of the same members that enforces nothing."""
    return AdaFuseLLM(engine=llm.engine, enforce=False)


def calls_of(response: Any) -> list[tuple[str, Any]]:
    blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
    return [(block.tool_name, block.tool_kwargs) for block in blocks]


@pytest.mark.quick
def test_it_is_a_function_calling_model_only_where_calls_can_be_enforced(llm, free, monkeypatch):
    assert llm.metadata.is_function_calling_model
    assert not free.metadata.is_function_calling_model
    monkeypatch.setattr(AdaFuseEngine, "can_enforce", False)
    assert not llm.metadata.is_function_calling_model
    assert calls_of(llm.chat_with_tools([ADD], "12 plus 7?")) == CALLS[:1]  # by the prompt


# chat_with_tools ---------------------------------------------------------------------------------


@pytest.mark.quick
async def test_text_reasoning_and_calls(llm):
    asked: dict[str, Any] = {"tools": [ADD, GREET], "user_msg": "Do both!"}
    asked |= {"allow_parallel_tool_calls": True, "max_words": 1}
    chunks = [*llm.stream_chat_with_tools(**asked)]
    sizes = [len(llm.get_tool_calls_from_response(chunk, False)) for chunk in chunks]
    assert sizes == sorted(sizes)
    assert {*sizes} == {0, 1, 2}  # each call as soon as it is whole
    parts = [kwargs for chunk in chunks for _, kwargs in calls_of(chunk) if isinstance(kwargs, str)]
    assert parts[0] == "{"
    assert '{"a": 12' in parts
    for response in (chunks[-1], await llm.achat_with_tools(**asked)):
        assert (response.message.content, calls_of(response)) == ("Let me see.\n", CALLS)
        selected = llm.get_tool_calls_from_response(response)
        assert [(each.tool_name, each.tool_kwargs) for each in selected] == CALLS
        assert len({each.tool_id for each in selected}) == 2
        blocks = response.message.blocks
        assert [each.content for each in blocks if isinstance(each, ThinkingBlock)] == ["Hm."]
        for_core = [each["function"] for each in response.message.additional_kwargs["tool_calls"]]
        assert [(each["name"], json.loads(each["arguments"])) for each in for_core] == CALLS
    assert "".join(chunk.delta or "" for chunk in chunks) == "Let me see.\n"
    assert "".join(each.additional_kwargs.get("thinking_delta", "") for each in chunks) == "Hm."
    assert llm.predict_and_call(**asked).response == "19\n\nGood day, Zoë."


def nod(yes: bool) -> str:
    """Nod or shake the head."""
    return str(yes)


@pytest.mark.parametrize("options", [{"tool_choice": "nod"}, {"tool_required": True}])
def test_a_call_that_must_be_made_is_made_and_fits_its_schema(llm, options):
    tools = [*[ADD] * ("tool_choice" in options), FunctionTool.from_defaults(nod)]
    last = llm.chat_with_tools(tools, "Hello?", **options)
    assert not last.message.content
    ((name, arguments),) = calls_of(last)
    assert (name, type(arguments["yes"])) == ("nod", bool)


def test_without_a_choice_of_tools_there_is_text(llm):
    assert not calls_of(llm.chat_with_tools([ADD], "12 plus 7?", tool_choice="none"))
    assert llm.chat([ChatMessage("12 plus 7?")]).message.content == SUM  # unchanged without tools
    assert calls_of(llm.chat_with_tools([ADD, GREET], "Do both!")) == CALLS[:1]


def test_a_reply_is_read_again_as_part_of_the_conversation(llm):
    asked = ChatMessage("What is 12 plus 7?")
    first = llm.chat_with_tools([ADD], asked)
    (selected,) = llm.get_tool_calls_from_response(first)
    result = ChatMessage("19", role="tool", additional_kwargs={"tool_call_id": selected.tool_id})
    as_json = ChatMessage.model_validate_json(first.message.model_dump_json())
    for message in (first.message, as_json):
        second = llm.chat_with_tools([ADD], chat_history=[asked, message, result])
        assert (second.message.content, calls_of(second)) == ("It is 19.", [])


def test_a_prompt_of_ones_own_describes_the_tools_whose_calls_replace_the_form_of_the_llm():
    seen: list[str] = []
    with AdaFuseEngine([scripted(lambda prompt: seen.append(prompt) or SUM)]) as engine:
        llm = AdaFuseLLM(
            engine=engine,
            json_schema={"type": "object"},
            messages_to_prompt=lambda messages: "\n".join(str(m) for m in messages) + "\nAnswer:",
        )
        response = llm.chat_with_tools([ADD], "12 plus 7?", tool_required=True)
    assert calls_of(response) == CALLS[:1]
    assert any('"name": "add", "description"' in text and "12 plus 7?" in text for text in seen)


def test_a_malformed_call_stays_in_the_text_with_the_reason():
    with scripted_engine(lambda _: "<tool_call>\nadd(12, 7)\n</tool_call>") as engine:
        llm = AdaFuseLLM(engine=engine, enforce=False)
        response = llm.chat_with_tools([ADD], "12 plus 7?")
    assert "add(12, 7)" in (response.message.content or "")
    assert "not JSON" in response.additional_kwargs["adafuse_warnings"][0]
    with pytest.raises(MalformedReplyError, match="calls no tool"):
        llm.get_tool_calls_from_response(response)


# Agents ------------------------------------------------------------------------------------------


async def test_the_stop_of_a_react_agent_comes_beside_others_and_only_where_steps_are_asked(llm):
    asked = ReActChatFormatter.from_defaults().format([ADD], [ChatMessage("12 plus 7?")])
    for path in ("chat", "achat", "stream_chat", "astream_chat"):
        assert (await ask(llm, path, asked)).text == STEP
    assert (await ask(llm, "chat", asked, stop="12")).text == STEP.partition("12")[0]
    configured = AdaFuseEngine(llm.engine.backends, llm.engine.config.override({"stop": "12"}))
    assert (await ask(AdaFuseLLM(engine=configured), "chat", asked)).text.endswith(': {"a": ')
    by_user = [ChatMessage(f"{asked[0].content}\n12 plus 7?")]
    assert (await ask(llm, "chat", by_user)).text == STEP + MADE_UP


async def test_a_tool_is_not_called_with_what_the_limit_cuts():
    saved: list[str] = []

    def save_note(text: str = "") -> str:
        """Save a note."""
        saved.append(text)
        return "Saved."

    story = written_call("save_note", text="A fox. " * 20)
    with scripted_engine(lambda _: story) as engine:
        llm = AdaFuseLLM(engine=engine, max_new_tokens=40)
        for streaming in (True, False):
            agent = FunctionAgent(tools=[save_note], llm=llm, streaming=streaming)
            with pytest.raises(MalformedReplyError, match="max_tokens"):
                await agent.run("Save a story.")
    step = 'Action: save_note\nAction Input: {"text": "A fox.", "more": "{red} ' + "x" * 99
    with scripted_engine(lambda _: f"Thought: I save it.\n{step}") as engine:
        react_llm = AdaFuseLLM(engine=engine, max_new_tokens=115, enforce=False)
        react_agent = ReActAgent(tools=[save_note], llm=react_llm)
        with pytest.raises(WorkflowRuntimeError, match="iterations"):
            await react_agent.run("Save a story.", max_iterations=2)
    assert not saved
