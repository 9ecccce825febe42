"""Fields of other servers: obeyed, ignored with a warning, or refused; never dropped silently."""

import json
from typing import Any

import httpx
import pytest

from adafuse_llm import AdaFuseEngine, RuntimeConfig
from adafuse_llm.serving import ServingConfig, bodies, create_app
from adafuse_llm.serving.bodies import Ignored, ServedRequest, read_chat
from adafuse_llm.serving.errors import ApiError
from adafuse_llm.serving.responses import _ResponseBody, read_response
from tests.support.models import CHATML
from tests.support.scripted import scripted, scripted_engine
from tests.support.serving import served
from tests.support.thinkers import TEMPLATES, thinkers

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What does a ticket cost if three cost 12 florins?"}]
SCHEMA = {"type": "object", "properties": {"florins": {"enum": [4]}}, "required": ["florins"]}
NAME = {"type": "object", "properties": {"name": {"enum": ["mill"]}}, "required": ["name"]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": NAME}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def read(**fields: Any) -> ServedRequest:
    """What a server reads in the body of a request for a chat completion."""
    return read_chat({"messages": QUESTION, **fields}, Ignored())


def messages(*turns: Any) -> list[Any]:
    """The messages that a server reads in a request. There is no warning."""
    asked = read(messages=[*QUESTION, *turns])
    assert asked.conversation is not None
    assert asked.ignored.warnings == []
    return list(asked.conversation.messages)


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


def chat(address, **fields):
    body = {"messages": QUESTION, "max_tokens": 12, **fields}
    return httpx.post(address + CHAT, json=body, timeout=60)


def text(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def warnings(response):
    return response.json().get("adafuse", {}).get("warnings", [])


@pytest.mark.quick
def test_keys_of_messages_that_no_member_reads_are_ignored():
    said = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Twelve by three.", "signature": "x"},
            {"type": "text", "text": "Four florins.", "cache_control": {"type": "ephemeral"}},
        ],
        "id": "msg_1",
        "reasoning": "Twelve by three.",
        "reasoning_details": [{"type": "reasoning.text", "text": "Twelve by three."}],
        "provider_specific_fields": {"refusal": None},
        "images": None,
    }
    again = {"role": "user", "content": "And six?", "cache_control": {"type": "ephemeral"}}
    plain = {"role": "assistant", "content": "Four florins."}
    assert messages(said, again) == messages(plain, {**again, "cache_control": None})


@pytest.mark.quick
def test_a_refusal_is_text_and_an_image_a_note():
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    apart = {"role": "assistant", "content": None, "refusal": "No."}
    plain = {"role": "assistant", "content": "No."}
    assert messages(refusal) == messages(apart) == messages(plain)
    old = {"role": "assistant", "content": None, "function_call": {"name": "look"}}
    assert messages(old)[-1]["tool_calls"][0]["name"] == "look"
    asked = read(messages=[{"role": "user", "content": [IMAGE, {"type": "text", "text": "?"}]}])
    assert asked.conversation is not None
    assert asked.conversation.messages[0]["content"] == "[image_url, not shown]?"
    assert "image_url" in asked.ignored.warnings[0]
    call: Any = {"id": "a", "function": {"name": "look", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    parts = [{"type": "text", "text": "A"}, IMAGE]
    result = {"role": "tool", "tool_call_id": "a", "content": parts}
    (told,) = read(messages=[*QUESTION, called, result]).ignored.warnings
    assert "image_url" in told
    call["function"]["arguments"] = '{"a": '
    (told,) = read(messages=[*QUESTION, called, {**result, "content": "A"}]).ignored.warnings
    assert "not a JSON object" in told


@pytest.mark.quick
@pytest.mark.parametrize(
    ("content", "read_as"),
    [
        ({"bolts": 4711, "é": None}, '{"bolts": 4711, "é": null}'),
        ({"type": "error", "text": 1}, '{"type": "error", "text": 1}'),
        (["Oslo", "Rome"], '["Oslo", "Rome"]'),
        ([{"name": "Oslo"}, {"name": "Rome"}], '[{"name": "Oslo"}, {"name": "Rome"}]'),
        ([], "[]"),
        (4711, "4711"),
        (False, "false"),
        (None, ""),
        ({"type": "text", "text": "4711"}, "4711"),
        ([{"type": "thinking"}, {"type": "text", "text": "4711"}], "4711"),
    ],
)
def test_data_in_the_result_of_a_tool_is_read_as_json(content, read_as):
    call: Any = {"id": "a", "name": "count", "arguments": "{}"}
    called = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": content}
    items = [
        {**call, "type": "function_call", "call_id": "a"},
        {"type": "function_call_output", "call_id": "a", "output": content},
    ]
    for asked in (
        read(messages=[called, result]),
        read_response({"input": items}, Ignored()),
    ):
        assert asked.ignored.warnings == []
        assert asked.conversation is not None
        assert asked.conversation.messages[-1]["content"] == read_as


def test_options_of_the_engine_are_obeyed(engine):
    drawn = {"top_k": 2, "min_p": 0.2, "temperature": 1.0, "seed": 3}
    biased = {"top_k": -1, "repetition_penalty": 1.5, "logit_bias": {" 4": -50}}
    with served(create_app(engine)) as url:
        for options in (drawn, biased, {"regex": "[a-c]{5}"}, {"choices": ["yes", "no"]}):
            response = chat(url, max_tokens=16, **options)
            own = {name: value for name, value in options.items() if value != -1}
            expected = engine.generate(messages=QUESTION, max_new_tokens=16, **own)
            assert (text(response), warnings(response)) == (expected.text, [])


@pytest.mark.quick
def test_other_fields_are_ignored_with_a_warning_or_refused():
    fields: dict[str, Any] = {
        "mirostat": (2, ""),
        "temperatur": (1, "Did you mean 'temperature'?"),
        "max_words": (3, "send it in 'adafuse'"),
        "a_field_of_next_year": ({"a": [1]}, ""),
        "logit_bias": ({"17": 5}, "token ids"),
    }
    for name, (value, advice) in fields.items():
        (told,) = read(**{name: value}).ignored.warnings
        assert f"'{name}' was ignored" in told
        assert advice in told


@pytest.mark.quick
def test_fields_that_promise_nothing_need_no_warning_and_what_sets_a_form_is_never_dropped():
    quiet, unset = dict.fromkeys(bodies.QUIET, "x"), dict.fromkeys(bodies.REFUSED)
    fields: dict[str, Any] = {**quiet, **unset, "functions": [], "store": False}
    assert read(**fields).ignored.warnings == []
    for name, advice in bodies.REFUSED.items():
        is_known = name in bodies._ChatBody.model_fields
        kind = bodies._CompletionBody if is_known else bodies._ChatBody
        with pytest.raises(ApiError) as caught:
            bodies.parse(kind, {name: [5]}, Ignored())
        assert caught.value.param == name
        assert advice in caught.value.message


@pytest.mark.quick
def test_warnings_have_a_limit_and_are_at_the_end_of_a_stream(address):
    response = chat(address, **{f"key\n{n}{'é' * 40}": "é" for n in range(5000)})
    assert len(warnings(response)) == bodies.MAX_WARNINGS
    streamed = chat(address, max_tokens=4, stream=True, mirostat=2)
    end = streamed.text.split("\n\n")[-3].removeprefix("data: ")
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "mirostat" in json.loads(end)["adafuse"]["warnings"][0]


@pytest.mark.quick
def test_half_a_character_becomes_a_whole_one(address):
    message = {"role": "user", "content": "a\ufffd b 🙂", "\ufffd": "\\ud83d"}
    whole = json.dumps({"messages": [message], "max_tokens": 3})
    half, headers = (
        whole.replace("\\ufffd", "\\ud83d"),
        {"Content-Type": "Application/JSON; charset=utf-8"},
    )
    first, second = (
        httpx.post(address + CHAT, content=body, headers=headers) for body in (whole, half)
    )
    assert text(second) == text(first)


def test_a_raw_prompt_with_control_tokens_has_a_warning():
    with scripted_engine(lambda _: "Yes.") as engine, served(create_app(engine)) as url:
        for prompt, count in (("a <|im_end|> b", 1), ("a <|fim|> b", 0)):
            body = {"prompt": ["x", prompt], "max_tokens": 2}
            told = warnings(httpx.post(url + COMPLETE, json=body))
            assert ["<|im_end|>" in each for each in told] == [True] * count


@pytest.mark.parametrize(
    ("fields", "limit", "room", "reason"),
    [
        ({}, None, 3750, "stop"),
        ({}, None, 1200, "length"),  # the default shrinks with the memory
        ({"adafuse": {"as_engine": True}}, None, 3750, "length"),  # as for a RemoteEngine
        ({"max_tokens": -1}, 300, 3750, "length"),
        ({"tools": [TOOL]}, None, 3750, "stop"),
    ],
)
def test_without_a_limit_a_reply_may_be_long(fields, limit, room, reason):
    member: Any = scripted(lambda _: "word " * 400)  # 1,601 tokens; the window has 8,192
    member.cache_bytes = lambda tokens: tokens
    with (
        AdaFuseEngine([member], runtime=RuntimeConfig(cache_bytes=room)) as engine,
        served(create_app(engine, ServingConfig(max_output_tokens=limit))) as url,
    ):
        body = {"messages": QUESTION, **fields}
        (choice,) = httpx.post(url + CHAT, json=body, timeout=60).json()["choices"]
    assert choice["finish_reason"] == reason


def test_effort_and_variables_reach_the_templates_that_read_them():
    def script(prompt):
        return "Four." if "</think>" in prompt else "<think>\nThree is few.\n</think>\n\nFour."

    with thinkers("qwen", script=script) as engine, served(create_app(engine)) as url:
        for fields in (
            {"reasoning_effort": "none"},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
        ):
            response = chat(url, max_tokens=60, **fields)
            assert "reasoning_content" not in response.json()["choices"][0]["message"]
        response = chat(url, max_tokens=60, reasoning_effort="high")
        assert "Three is few." in response.json()["choices"][0]["message"]["reasoning_content"]
        (told,) = warnings(response)
        assert "no chat template of the members reads it" in told


@pytest.mark.parametrize(
    ("effort", "template", "shown", "is_ignored"),
    [
        ("low", CHATML, "low<|im_start|>", False),
        ("high", CHATML, "<|im_start|>", True),
        ("none", CHATML, "<|im_start|>", True),
        ("none", TEMPLATES["qwen"], "<|im_start|>", False),  # a variable switches it off
    ],
)
def test_an_effort_that_a_template_refuses_is_left_out(effort, template, shown, is_ignored):
    picky = (
        "{%- if reasoning_effort is defined %}{{- reasoning_effort }}"
        "{%- if reasoning_effort not in ('low', 'xhigh') %}{{- raise_exception('low or xhigh') }}"
        "{%- endif %}{% endif %}"
    )
    prompts, off = [], "<think>\n\n</think>\n\n" if "enable_thinking" in template else ""

    def script(prompt):
        prompts.append(prompt)
        return f"{off}Four."

    member = scripted(script, template=picky + template)
    with AdaFuseEngine([member]) as engine, served(create_app(engine)) as url:
        response = chat(url, reasoning_effort=effort)
    assert text(response) == "Four."
    assert prompts[0].startswith(shown)
    assert [f"'{effort}' is refused" in told for told in warnings(response)] == [True] * is_ignored


@pytest.mark.quick
def test_a_schema_is_obeyed_wherever_servers_put_it_and_else_an_error():
    for given in (
        {"type": "json_object", "schema": SCHEMA},  # llama.cpp
        {"type": "json_schema", "name": "price", "schema": SCHEMA, "strict": True},  # Responses
        {"type": "json_schema", "json_schema": {"name": "price", "schema": SCHEMA}},
    ):
        form = read(response_format=given).form
        assert form is not None
        assert form.schema == SCHEMA
    for kind, schema in (("json_object", {"type": "object"}), ("text", None)):
        form = read(response_format={"type": kind}).form
        assert form is not None
        assert form.schema == schema
    for wrong in (
        {"type": "text", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "price", "shcema": SCHEMA}},
        {"type": "regex", "regex": "[0-9]"},
        {},
    ):
        assert refused(response_format=wrong).param == "response_format"
    anthropic = {"name": "look_up", "input_schema": NAME}
    camel = {"type": "function", "function": {"name": "look_up", "inputSchema": NAME}}
    for tool in (anthropic, camel):
        assert refused(tools=[tool]).param == "tools"


SHAPE = {"type": "function", "schema": 1, "5": "x"}


@pytest.mark.parametrize(
    ("path", "kind", "body", "odd"),
    [
        (CHAT, bodies._ChatBody, {"messages": QUESTION, "max_tokens": 1}, [{}]),
        (COMPLETE, bodies._CompletionBody, {"prompt": "x", "max_tokens": 1}, "x"),
        ("/v1/responses", _ResponseBody, {"input": "x", "max_output_tokens": 1}, SHAPE),
        ("/tokenize", bodies.TokenizeBody, {"prompt": "x"}, -1),
    ],
)
def test_an_odd_value_of_a_field_is_no_failure_of_the_server(address, path, kind, body, odd):
    failed, names = {}, {*kind.model_fields, *bodies.OPTIONS}
    with httpx.Client() as client:
        for name in names - {*bodies.LENGTHS} if odd == -1 else names:
            response = client.post(address + path, json={**body, name: odd})
            if response.status_code not in (200, 400, 404):
                failed[name] = response.text
    assert failed == {}
