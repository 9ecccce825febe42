"""LiteLLM against a server: conversations, tools, streams, JSON, the Responses API.

Usage: python litellm_calls.py ADDRESS
"""

import json
import sys

import litellm

SERVER = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "max_tokens": 200}
QUESTION = {"role": "user", "content": "What is 31 * 44?"}


def of(**kinds):
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    return {"type": "object", "properties": properties, "required": [*kinds]}


CALCULATE = {"name": "calculate", "description": "Compute.", "parameters": of(expression="string")}
TOOLS = [{"type": "function", "function": CALCULATE}]
PRICE = {
    "type": "json_schema",
    "json_schema": {"name": "price", "schema": of(florins="integer")},
}


def chat(messages, *, provider="openai", **options):
    return litellm.completion(f"{provider}/adafuse", messages=messages, **SERVER, **options)


for provider in ("openai", "hosted_vllm"):
    hello = [{"role": "user", "content": "Hello!"}]
    first = chat(hello, provider=provider).choices[0].message
    assert first.content == "Good day.", first
    # the whole object of LiteLLM goes back, with provider_specific_fields and others
    second = chat([*hello, first.model_dump(), QUESTION], provider=provider, tools=TOOLS)
    reply = second.choices[0]
    assert reply.finish_reason == "tool_calls", second
    (call,) = reply.message.tool_calls
    assert json.loads(call.function.arguments) == {"expression": "31 * 44"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "1364"}
    history = [*hello, first, QUESTION, reply.message, result]
    last = chat(history, provider=provider, tools=TOOLS).choices[0].message
    assert last.content == "It is 1364.", last

parts = list(chat(hello, stream=True, stream_options={"include_usage": True}))
assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "Good day."
assert parts[-1].usage.completion_tokens > 0

price = chat([{"role": "user", "content": "What is the price?"}], response_format=PRICE)
assert json.loads(price.choices[0].message.content) == {"florins": 4}, price

extra = {"top_k": 3, "mirostat": 2}
told = chat(hello, provider="hosted_vllm", reasoning_effort="low", extra_body=extra)
assert told.choices[0].message.content == "Good day."

SAME = {"model": "openai/adafuse", "api_base": SERVER["api_base"], "api_key": "none"}
whole = litellm.responses(input="Hello!", **SAME)
assert whole.output[0].content[0].text == "Good day.", whole
events = litellm.responses(input="Hello!", stream=True, **SAME)
kinds = [str(event.type) for event in events]
assert kinds[-1].lower().endswith("completed"), kinds
print("done")
