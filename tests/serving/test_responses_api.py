"""The Responses API of OpenAI, used by OpenAI's own client; tokens and context windows."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from adafuse_llm.serving.bodies import Ignored
from adafuse_llm.serving.responses import read_response
from tests.support.scripted import scripted_engine
from tests.support.serving import CALCULATE, CALL, openai_client
from tests.support.thinkers import thinkers

pytestmark = pytest.mark.quick

QUESTION = "What does a ticket cost if three cost 12 florins?"
MESSAGES = [{"role": "user", "content": QUESTION}]
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "strict": True, **CALCULATE}


def ask(client, **changes):
    given = {"model": "adafuse", "input": QUESTION, "max_output_tokens": 60, **changes}
    return client.responses.create(**given)


def kinds(events):
    types = [event.type.removeprefix("response.") for event in events]
    return [each for n, each in enumerate(types) if n == 0 or types[n - 1] != each]


def test_a_response_is_the_text_of_the_engine(client, engine):
    expected = engine.generate(messages=MESSAGES, max_new_tokens=60)
    response = ask(client, metadata={"a": "b"}, extra_body={"adafuse": {"rounds": True}})
    assert (response.output_text, response.status) == (expected.text, "completed")
    assert response.error is response.incomplete_details is response.previous_response_id is None
    assert response.metadata == {"a": "b"}
    assert response.text.format.type == "text"
    assert (response.temperature, response.top_p) == (engine.config.temperature, 1)
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    extension = response.model_extra["adafuse"]
    assert extension["finish_reason"] == expected.finish_reason
    assert [done["text"] for done in extension["rounds"]] == [r.text for r in expected.rounds]
    counts = (expected.usage.prompt_tokens, expected.usage.completion_tokens)
    totals = [sum(each[name] for each in counts) for name in engine.members]
    assert response.usage.total_tokens == max(totals)
    assert response.usage.input_tokens + response.usage.output_tokens == max(totals)
    assert response.usage.output_tokens_details.reasoning_tokens == 0


def test_the_events_of_a_stream_are_those_of_openai(client, address, engine):
    expected = engine.generate(messages=MESSAGES, max_new_tokens=60)
    with client.responses.stream(model="adafuse", input=QUESTION, max_output_tokens=60) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert kinds(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == [done.text for done in expected.rounds if done.text]
    assert final.output_text == expected.text
    body = {"input": QUESTION, "max_output_tokens": 60, "stream": True}
    with httpx.stream("POST", f"{address}/v1/responses", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    for name, line in zip(lines[::2], lines[1::2], strict=True):
        data = json.loads(line.removeprefix("data: "))
        assert data["type"] == name.removeprefix("event: ")
        EVENT.validate_python(data, strict=True)  # has all fields that OpenAI's types require
    done = json.loads(lines[-1].removeprefix("data: "))["response"]
    assert done["output"][0]["content"] == ask(client).model_dump()["output"][0]["content"]
    assert done["adafuse"]["usage"]["completion_tokens"] == expected.usage.completion_tokens


def test_a_response_that_is_cut_is_incomplete(client):
    response = ask(client, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    *_, last = ask(client, max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.output_text == response.output_text


def test_functions_are_called_and_their_results_are_read():
    def reply(prompt):
        return "It is 1364." if "1364" in prompt else f"Let me see.\n{CALL}"

    question = [{"role": "user", "content": "What is 31 * 44?"}]
    given = {"tools": [TOOL], "max_output_tokens": 200, "store": False}
    with scripted_engine(reply) as engine, openai_client(engine) as c:
        response = ask(c, input=question, **given)
        message, call = response.output
        assert message.content[0].text.strip() == "Let me see."
        assert (call.type, call.name, call.status) == ("function_call", "calculate", "completed")
        assert json.loads(call.arguments) == {"expression": "31 * 44"}
        events = list(ask(c, input=question, **given, stream=True))
        assert kinds(events)[-6:] == [
            *("output_item.done", "output_item.added", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done", "completed"),
        ]
        pieces = [e.delta for e in events if e.type.endswith("arguments.delta")]
        assert (len(pieces) > 1, "".join(pieces)) == (True, call.arguments)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "1364"}
        history = [*question, *(item.model_dump() for item in response.output), result]
        assert ask(c, input=history, **given).output_text == "It is 1364."
        chosen = {"type": "function", "name": "calculate"}
        (forced,) = ask(c, input="1364", **given, tool_choice=chosen).output
        assert forced.name == "calculate"


def test_reasoning_is_counted_outside_the_event_loop(monkeypatch):
    counted = []

    def count(text, **_):
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        counted.append(text.strip())
        return {"qwen": [1]}

    with thinkers("qwen", script=lambda _: "<think>\nHm.\n</think>\n\nFour.") as engine:
        monkeypatch.setattr(engine, "encode_text", count)
        with openai_client(engine) as client:
            ask(client, max_output_tokens=100)
            list(ask(client, max_output_tokens=100, stream=True))
    assert counted == ["Hm."] * 2


def test_reasoning_is_an_item_and_returns_to_the_members():
    reply = "<think>\nThree is few.\n</think>\n\nFour."
    with thinkers("qwen", script=lambda _: reply) as engine, openai_client(engine) as client:
        response = ask(client, max_output_tokens=100)
        reasoning, message = response.output
        assert reasoning.content[0].text.strip() == "Three is few."
        assert message.content[0].text == "Four."
        details = response.usage.output_tokens_details
        assert 0 < details.reasoning_tokens < response.usage.output_tokens
        events = list(ask(client, max_output_tokens=100, stream=True))
        assert kinds(events)[2:7] == [
            *("output_item.added", "content_part.added", "reasoning_text.delta"),
            *("reasoning_text.done", "content_part.done"),
        ]
        call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "c", "output": "few"}
        user = {"role": "user", "content": "How many?"}
        history = [user, reasoning.model_dump(), message.model_dump(), call, result]
        assert ask(client, input=history, max_output_tokens=100).output_text == "Four."
    conversation = read_response({"input": history}, Ignored()).conversation
    assert conversation is not None
    (_, turn, _) = conversation.messages
    assert turn["reasoning_content"].strip() == "Three is few."
    assert (turn["content"], turn["tool_calls"][0]["name"]) == ("Four.", "look")
    summary = {"type": "reasoning", "summary": [{"text": "Three"}, {"text": "is few."}]}
    given = {"input": [user, summary, call, result]}
    conversation = read_response(given, Ignored()).conversation
    assert conversation is not None
    assert [turn["role"] for turn in conversation.messages] == ["user", "assistant", "tool"]
    assert conversation.messages[1]["reasoning_content"] == "Three\n\nis few."
    conversation = read_response({"input": [user, call, result]}, Ignored()).conversation
    assert conversation is not None
    assert [turn["role"] for turn in conversation.messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("background", {"background": True}),
        ("prompt", {"prompt": {"id": "pmpt_1"}}),
        ("n", {"extra_body": {"n": 2}}),
        ("input", {"input": []}),
        ("input.0", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("max_output_tokens", {"max_output_tokens": 401}),
        ("reasoning.effort", {"extra_body": {"reasoning": {"effort": 3}}}),
        ("text.format", {"text": {"format": {"type": "json_schema", "json_schema": {}}}}),
    ],
)
def test_what_a_response_cannot_do_is_an_error(client, param, changes):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **changes)
    assert caught.value.param == param


def test_what_is_ignored_is_told(client):
    ignored: Any = {"store": True, "truncation": "auto", "reasoning": {"effort": "low"}}
    quiet: Any = {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}}
    raw = client.responses.with_raw_response.create(
        model="adafuse", input=QUESTION, max_output_tokens=4, **ignored, **quiet
    )
    told = raw.parse().model_extra["adafuse"]["warnings"]
    for name in ("store", "truncation", "reasoning_effort"):
        assert any(f"'{name}'" in each for each in told), name
    assert raw.parse().store is False


def test_what_the_members_cannot_read_ends_no_conversation(client):
    """An agent sends its own tools, and the items of earlier turns with other models."""
    call = {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "+ a"}
    image = [{"type": "input_image", "image_url": "x"}, {"type": "input_text", "text": "a fox"}]
    history = [
        {"role": "user", "content": [{"type": "input_file", "file_data": "x"}, QUESTION]},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "function_call", "call_id": "b", "name": "look", "arguments": "{}"},
        call,
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
        {"type": "function_call_output", "call_id": "b", "output": image},
    ]
    body = {"input": history, "tools": [{"type": "web_search"}, TOOL], "background_x": 1}
    ignored = Ignored()
    conversation = read_response(body, ignored).conversation
    assert conversation is not None
    question, said, *results = conversation.messages
    assert question["content"] == f"[input_file, not shown]{QUESTION}"
    assert [each["name"] for each in said["tool_calls"]] == ["look", "patch"]
    assert said["tool_calls"][1]["arguments"] == {"input": "+ a"}
    assert [each["content"] for each in results] == ["done", "[input_image, not shown]\na fox"]
    assert [each.name for each in conversation.tools] == ["calculate"]
    names = ("'web_search'", "'web_search_call'", "input_file, input_image", "'background_x'")
    assert [name for name in names if name not in " ".join(ignored.warnings)] == []
    assert ask(client, input=history, tools=body["tools"], max_output_tokens=400).output


def test_tokens_are_those_of_each_member(address, engine):
    def post(**body):
        return httpx.post(f"{address}/tokenize", json=body)

    expected = engine.encode_prompt(QUESTION)
    both = post(prompt=QUESTION).json()
    assert both["adafuse"]["tokens"] == expected
    assert both["count"] == max(map(len, expected.values())) == len(both["tokens"])
    assert both["max_model_len"] == engine.context_window
    name = engine.members[1]
    assert post(model=name, prompt=QUESTION).json()["tokens"] == expected[name]
    inside = post(model=name, prompt=" mill", add_special_tokens=False).json()["tokens"]
    assert inside == engine.encode_text(" mill")[name]
    read = post(model=name, messages=MESSAGES).json()["tokens"]
    assert read == engine.encode_prompt(messages=MESSAGES)[name]
    wrong: list[dict[str, Any]] = [{}, {"prompt": "a", "messages": MESSAGES}, {"messages": []}]
    assert {post(**each).status_code for each in wrong} == {400}
    assert post(prompt="mill " * 20_000).status_code == 400
    assert post(model="nobody", prompt="a").status_code == 404
