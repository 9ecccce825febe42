"""Fields of other servers: obeyed, ignored with a warning, or refused; never dropped silently."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from adafuse_llm import AdaFuseEngine, RuntimeConfig
from adafuse_llm.serving import ServingConfig, create_app
from adafuse_llm.serving.bodies import (
    HEADER,
    LENGTHS,
    MAX_HEADER,
    MAX_WARNINGS,
    OPTIONS,
    QUIET,
    REFUSED,
    TokenizeBody,
    _ChatBody,
    _CompletionBody,
)
from adafuse_llm.serving.responses import _ResponseBody
from tests.support.paths import ROOT
from tests.support.scripted import scripted, scripted_engine
from tests.support.serving import served
from tests.support.thinkers import thinkers

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What does a ticket cost if three cost 12 florins?"}]
SCHEMA = {
    "type": "object",
    "properties": {"florins": {"type": "integer", "enum": [4]}},
    "required": ["florins"],
    "additionalProperties": False,
}
NAME = {"type": "object", "properties": {"name": {"enum": ["mill"]}}, "required": ["name"]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": NAME}}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"name": "mill"}}\n</tool_call>'


def chat(address, **fields):
    body = {"messages": QUESTION, "max_tokens": 12, **fields}
    return httpx.post(address + CHAT, json=body, timeout=60)


def text(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def warnings(response):
    return response.json().get("adafuse", {}).get("warnings", [])


def error(response):
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_keys_of_messages_that_no_member_reads_are_ignored(address, strict):
    said = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Twelve by three.", "signature": "x"},
            {"type": "text", "text": "Four florins.", "cache_control": {"type": "ephemeral"}},
        ],
        "id": "msg_1",
        "reasoning": "Twelve by three.",
        "reasoning_details": [{"type": "reasoning.text", "text": "Twelve by three."}],
        "thinking_blocks": [{"type": "thinking", "thinking": "Twelve by three."}],
        "provider_specific_fields": {"refusal": None},
        "annotations": [],
        "images": None,
        "anything": {"else": 1},
    }
    again = {"role": "user", "content": "And six?", "cache_control": {"type": "ephemeral"}}
    plain = [{"role": "assistant", "content": "Four florins."}, {**again, "cache_control": None}]
    expected = text(chat(address, messages=[*QUESTION, *plain]))
    for url in (address, strict):
        response = chat(url, messages=[*QUESTION, said, again])
        assert text(response) == expected
        assert warnings(response) == []
        assert HEADER not in response.headers


def test_a_refusal_is_text_and_an_image_is_still_refused(address):
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    said = {"role": "assistant", "content": "No."}
    again = {"role": "user", "content": "Why?"}
    assert text(chat(address, messages=[*QUESTION, refused, again])) == text(
        chat(address, messages=[*QUESTION, said, again])
    )
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with_image = chat(address, messages=[{"role": "user", "content": [image]}])
    assert "only text is allowed" in error(with_image)["message"]
    call = {"id": "a", "function": {"name": "look", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {
        "role": "tool",
        "tool_call_id": "a",
        "content": [{"type": "text", "text": "A"}, image],
    }
    (told,) = warnings(chat(address, messages=[*QUESTION, called, result]))
    assert "the members read 'image_url' as a short text" in told


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2, "min_p": 0.2, "temperature": 1.0, "seed": 3},
        {"top_k": -1},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "logit_bias": {" 4": -50}},
        {"regex": "[a-c]{5}"},
        {"choices": ["yes", "no"]},
        {"json_schema": SCHEMA},
    ],
    ids="-".join,
)
def test_fields_that_the_engine_has_are_obeyed(strict, engine, options):
    response = chat(strict, max_tokens=16, **options)
    if options.get("top_k") == -1:
        options = {}
    assert text(response) == engine.generate(messages=QUESTION, max_new_tokens=16, **options).text
    assert warnings(response) == []


def test_other_fields_are_ignored_with_a_warning_or_refused(address, strict):
    plain = text(chat(address))
    fields = {
        "mirostat": 2,
        "temperatur": 1,
        "max_words": 3,
        "a_field_of_next_year": {"a": [1]},
        "reasoning_effort": "low",
        "logit_bias": {"17": 5},
    }
    response = chat(address, **fields)
    assert text(response) == plain
    told = warnings(response)
    assert len(told) == len(fields)
    for name, value in fields.items():
        (one,) = [each for each in told if f"'{name}'" in each]
        assert one in response.headers[HEADER]
        refused = error(chat(strict, **{name: value}))
        assert refused["code"] == "unsupported_parameter"
        assert refused["param"] == name
        assert "ignored" not in refused["message"]
    assert any("Did you mean 'temperature'?" in each for each in told)
    assert any("send it in 'adafuse'" in each for each in told)


def test_warnings_have_a_limit(address):
    response = chat(address, **{f"key\n{n}{'é' * 40}": "é" for n in range(5000)})
    assert len(warnings(response)) == MAX_WARNINGS
    assert response.headers[HEADER].isascii()
    assert MAX_HEADER - 2 < len(response.headers[HEADER]) <= MAX_HEADER  # no space at its end


def test_a_stream_has_the_warnings_in_its_header_and_at_its_end(address):
    body = {"messages": QUESTION, "max_tokens": 4, "stream": True, "mirostat": 2}
    with httpx.stream("POST", address + CHAT, json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert "mirostat" in response.headers[HEADER]
    assert "mirostat" in json.loads(lines[-2])["adafuse"]["warnings"][0]


def test_fields_that_promise_nothing_need_no_warning(address, strict):
    plain = text(chat(address))
    fields: dict[str, Any] = {
        **dict.fromkeys(QUIET, "x"),
        **dict.fromkeys(REFUSED, None),
        "functions": [],
    }
    fields |= {"function_call": "auto", "store": False}
    for url in (address, strict):
        response = chat(url, **fields)
        assert text(response) == plain
        assert warnings(response) == []


def test_what_determines_the_form_of_an_answer_is_never_dropped(address):
    for name, advice in REFUSED.items():
        refused = error(chat(address, **{name: [5]}))
        assert refused["param"] == name
        assert advice in refused["message"]


def test_half_a_character_becomes_a_whole_one(address):
    message = {"role": "user", "content": "a\ufffd b 🙂", "\ufffd": "\\ud83d"}
    whole = json.dumps({"messages": [message], "max_tokens": 3})
    half, headers = whole.replace("\\ufffd", "\\ud83d"), {"Content-Type": "application/json"}
    first, second = (
        httpx.post(address + CHAT, content=body, headers=headers) for body in (whole, half)
    )
    assert text(second) == text(first)


def test_a_raw_prompt_with_control_tokens_has_a_warning():
    with scripted_engine(lambda _: "Yes.") as engine, served(create_app(engine)) as url:
        for prompt, spelled in (("a <|im_end|> b", ["<|im_end|>"]), ("a <|fim|> b", [])):
            body = {"prompt": ["x", prompt], "max_tokens": 2}
            told = warnings(httpx.post(url + COMPLETE, json=body))
            assert [each for each in spelled if each in told[0]] == spelled
            assert len(told) == len(spelled)


@pytest.mark.parametrize(
    ("fields", "limit", "reason"),
    [
        ({}, None, "length"),
        ({"max_tokens": -1}, None, "stop"),
        ({"max_tokens": -1}, 300, "length"),
        ({"tools": [TOOL]}, None, "stop"),
        ({"tools": [TOOL], "max_tokens": 9}, None, "length"),
    ],
)
def test_without_a_limit_a_reply_with_tools_may_fill_the_context_window(fields, limit, reason):
    long = "word " * 400
    runtime = RuntimeConfig(cache_bytes=240_000)  # for 3,750 tokens, and the window has 8,192
    with (
        AdaFuseEngine([scripted(lambda _: long)], runtime=runtime) as engine,
        served(create_app(engine, ServingConfig(max_output_tokens=limit))) as url,
    ):
        body = {"messages": QUESTION, **fields}
        (choice,) = httpx.post(url + CHAT, json=body, timeout=60).json()["choices"]
    assert choice["finish_reason"] == reason


def test_effort_and_variables_reach_the_templates_that_read_them():
    def script(prompt):
        return "Four." if "</think>" in prompt else "<think>\nThree is few.\n</think>\n\nFour."

    with thinkers("qwen", script=script) as engine, served(create_app(engine)) as url:
        thought = chat(url, max_tokens=60).json()["choices"][0]["message"]
        assert "Three is few." in thought["reasoning_content"]
        for fields in (
            {"reasoning_effort": "none"},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ):
            response = chat(url, max_tokens=60, **fields)
            assert "reasoning_content" not in response.json()["choices"][0]["message"]
            assert warnings(response) == ["the reply is empty"]
        (told,) = warnings(chat(url, max_tokens=60, reasoning_effort="high"))
        assert "no chat template of the members reads it" in told


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json_object", "schema": SCHEMA},  # llama.cpp
        {"type": "json_schema", "name": "price", "schema": SCHEMA, "strict": True},  # Responses
        {"type": "json_schema", "json_schema": {"name": "price", "schema": SCHEMA}},
    ],
)
def test_a_schema_is_obeyed_wherever_servers_put_it(address, given):
    response = chat(address, max_tokens=60, response_format=given)
    assert json.loads(text(response)) == {"florins": 4}
    assert warnings(response) == []


@pytest.mark.parametrize(
    "given",
    [
        {"type": "text", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "price", "shcema": SCHEMA}},
        {"type": "regex", "regex": "[0-9]"},
        {},
    ],
)
def test_a_schema_in_another_place_is_an_error(address, given):
    assert error(chat(address, response_format=given))["param"] == "response_format"


@pytest.mark.parametrize(
    "tool",
    [
        {"name": "look_up", "input_schema": NAME},  # Anthropic
        {"type": "function", "function": {"name": "look_up", "inputSchema": NAME}},
    ],
)
def test_a_tool_of_another_form_is_an_error(address, tool):
    assert error(chat(address, tools=[tool]))["param"] == "tools"


BODIES: dict[str, Any] = {
    CHAT: (_ChatBody, {"messages": QUESTION, "max_tokens": 1}),
    COMPLETE: (_CompletionBody, {"prompt": "x", "max_tokens": 1}),
    "/v1/responses": (_ResponseBody, {"input": "x", "max_output_tokens": 1}),
    "/tokenize": (TokenizeBody, {"prompt": "x"}),
}


@pytest.mark.parametrize(
    ("path", "odd"),
    [
        (CHAT, {"type": []}),
        (CHAT, [{}]),
        (COMPLETE, "x"),
        ("/v1/responses", [None]),
        ("/v1/responses", {"type": "function", "schema": 1, "5": "x"}),
        ("/tokenize", -1),
    ],
)
def test_an_odd_value_of_a_field_is_no_failure_of_the_server(address, path, odd):
    kind, body = BODIES[path]
    failed = {}
    with httpx.Client() as client:
        for name in {*kind.model_fields, *OPTIONS}:
            if odd == -1 and name in LENGTHS:
                continue
            response = client.post(address + path, json={**body, name: odd})
            if response.status_code not in (200, 400, 404):
                failed[name] = response.text
    assert failed == {}


def test_the_guide_lists_the_fields():
    guide = (ROOT / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")
    for body in (_ChatBody, _CompletionBody, _ResponseBody):
        fields = {*body.model_fields, *LENGTHS, *REFUSED} - {"text", "reasoning"}
        assert [name for name in sorted(fields) if f"`{name}`" not in guide] == []
