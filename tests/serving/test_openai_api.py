"""The API of OpenAI, used by OpenAI's own client: texts, rounds, tools, forms, usage, errors."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from adafuse_llm import Round
from tests.support.scripted import scripted_engine
from tests.support.serving import CALCULATE, CALL, openai_client
from tests.support.thinkers import thinkers

pytestmark = pytest.mark.quick

QUESTION = [{"role": "user", "content": "What does a ticket cost if three cost 12 florins?"}]
PRODUCT: Any = [{"role": "user", "content": "What is 31 * 44?"}]
WORDS = {"max_tokens": 12}
SWEET_SPAN = "benchmarks.peers.sweetspan:SweetSpan"
"""The place of a strategy that is not part of the package."""
TOOL: Any = {"type": "function", "function": CALCULATE}


def ask(client, **changes):
    return client.chat.completions.create(
        **{"model": "adafuse", "messages": QUESTION, **WORDS, **changes}
    )


def test_a_chat_is_the_response_of_the_engine(client, engine):
    expected = engine.generate(messages=QUESTION, max_new_tokens=12)
    response = ask(client, extra_body={"adafuse": {"rounds": True}})
    (choice,) = response.choices
    assert (choice.message.content, choice.message.role) == (expected.text, "assistant")
    rounds = [Round.model_validate(each) for each in choice.model_extra["adafuse"]["rounds"]]
    assert [each.text for each in rounds] == [each.text for each in expected.rounds]
    assert choice.model_extra["adafuse"]["finish_reason"] == expected.finish_reason
    prompt = expected.usage.prompt_tokens
    assert response.model_extra["adafuse"]["usage"]["prompt_tokens"] == prompt
    totals = [prompt[name] + expected.usage.completion_tokens[name] for name in prompt]
    assert response.usage.total_tokens == max(totals)


def test_a_stream_has_the_role_the_spans_the_reason_and_the_usage(client, engine):
    expected = engine.generate(messages=QUESTION, max_new_tokens=12)
    given = {"stream_options": {"include_usage": True}, "extra_body": {"adafuse": {"rounds": True}}}
    chunks = list(ask(client, stream=True, **given))
    first, *spans, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(each.choices[0].delta.content for each in spans) == expected.text
    shown = [each.model_extra["adafuse"]["round"] for each in spans]
    assert [each["text"] for each in shown] == [r.text for r in expected.rounds]
    assert {each.choices[0].finish_reason for each in chunks[:-2]} == {None}
    assert last.choices[0].finish_reason == {"stop": "stop"}.get(expected.finish_reason, "length")
    assert usage.choices == []
    assert usage.usage.completion_tokens > 0
    assert len({each.id for each in chunks}) == 1


def test_the_usage_of_a_stream_counts_all_its_responses(client):
    given = {"n": 2, "temperature": 1.0, "seed": 3}
    *chunks, last = ask(client, stream=True, stream_options={"include_usage": True}, **given)
    assert {each.choices[0].index for each in chunks} == {0, 1}
    whole, single = ask(client, **given), ask(client, **{**given, "n": 1})
    assert last.usage.total_tokens == whole.usage.total_tokens > single.usage.total_tokens
    counted = [each.model_extra["adafuse"]["usage"]["completion_tokens"] for each in (last, whole)]
    assert counted[0] == counted[1]


def test_a_round_of_a_stream_says_whose_its_text_is(client, engine):
    def rounds(**given):
        chunks = ask(client, stream=True, extra_body={"adafuse": {"rounds": True}, **given})
        extensions = (each.model_extra.get("adafuse", {}) for each in chunks)
        return [each["round"] for each in extensions if "round" in each]

    for each in rounds():
        winner = each["candidates"][each["winner"]]
        is_agreed = len(each["candidates"]) == 1 and len(winner["proposers"]) > 1
        assert each["shared"] == ("agreed" if is_agreed else None)
        best = min(winner["proposers"], key=winner["nll"].get)
        assert each["owner"] == (None if is_agreed else best)
        assert each["probabilities"] is None
    (chosen,) = rounds(choices=["4", "5", "6"])
    choice = engine.choose(messages=QUESTION, choices=["4", "5", "6"])
    assert (chosen["shared"], chosen["owner"]) == ("chosen", None)
    assert chosen["probabilities"] == pytest.approx(choice.probabilities)


def test_a_member_alone_answers_as_its_own_model(client, engine):
    names = [model.id for model in client.models.list()]
    assert names == ["adafuse", *engine.members]
    assert client.models.retrieve(names[1]).model_extra["adafuse"]["members"] == [names[1]]
    alone = engine.with_strategy("single").generate(
        messages=QUESTION, max_new_tokens=12, use=(names[1],)
    )
    assert ask(client, model=names[1]).choices[0].message.content == alone.text


def test_a_request_may_name_the_strategies_of_the_package_and_of_the_server(engine):
    """The place of a strategy is for the operator: a client cannot make the server import it."""
    with openai_client(engine.with_strategy(SWEET_SPAN)) as client:
        for name in ("sweetspan", "auto", "mixture", "single"):
            given: Any = {"max_tokens": 3, "extra_body": {"adafuse": {"strategy": name}}}
            model = engine.members[0] if name == "single" else "adafuse"
            strategy = ask(client, model=model, **given).choices[0].adafuse["strategy"]
            assert strategy == ("adafuse" if name == "auto" else name)
        with pytest.raises(openai.BadRequestError, match="Strategies: sweetspan, auto") as caught:
            ask(client, extra_body={"adafuse": {"strategy": SWEET_SPAN}})
        assert caught.value.param == "adafuse.strategy"


def test_responses_are_drawn_with_a_seed(client, engine):
    drawn = {"temperature": 1.0, "seed": 5, "n": 2}
    expected = engine.generate(messages=QUESTION, max_new_tokens=12, **drawn)
    texts = [expected.text, expected.alternatives[0].text]
    response = ask(client, **drawn)
    assert [(c.index, c.message.content) for c in response.choices] == [*enumerate(texts)]
    told = [response.choices[0].model_extra["adafuse"]]
    streamed = ["", ""]
    for chunk in ask(client, **drawn, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            told += [chunk.adafuse] if choice.index == 0 and choice.finish_reason else []
    assert streamed == texts
    assert [(each["seed"], each["strategy"]) for each in told] == [(5, engine.strategy.name)] * 2


def test_stop_sequences_end_the_text(client):
    whole = ask(client).choices[0].message.content
    stop = whole.split()[1]
    (choice,) = ask(client, stop=[stop]).choices
    assert (choice.message.content, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_log_probabilities_are_those_of_the_leading_member(client):
    choice = ask(client, logprobs=True, top_logprobs=2).choices[0]
    tokens = choice.logprobs.content
    assert "".join(each.token for each in tokens).strip() == choice.message.content
    assert all(len(each.top_logprobs) == 2 for each in tokens)
    assert all(-99 < each.logprob <= 0 for each in tokens)
    assert all(bytes(each.bytes).decode() == each.token for each in tokens)
    streamed = [
        each.token
        for chunk in ask(client, logprobs=True, stream=True)
        if chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content
    ]
    assert streamed == [each.token for each in tokens]


def test_completions_continue_prompts(client, engine):
    prompts = ["The old mill", "A ticket costs"]
    expected = [engine.generate(prompt, max_new_tokens=6) for prompt in prompts]
    given = {"model": "adafuse", "max_tokens": 6}
    both = client.completions.create(prompt=prompts, logprobs=1, **given)
    assert [choice.text for choice in both.choices] == [each.text for each in expected]
    assert both.choices[0].finish_reason == "length"
    logprobs = both.choices[0].logprobs
    assert "".join(logprobs.tokens).endswith(expected[0].text)
    assert logprobs.text_offset == [
        len("".join(logprobs.tokens[:at])) for at in range(len(logprobs.tokens))
    ]
    assert both.usage.prompt_tokens == max(
        sum(each.usage.prompt_tokens[name] for each in expected) for name in engine.members
    )
    chunks = client.completions.create(prompt=prompts[0], stream=True, **given)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[0].text


def test_tools_are_called_in_an_enforced_form():
    def reply(prompt):
        return "It is 1364." if "1364" in prompt else f"Let me see.\n{CALL}"

    given: Any = {"tools": [TOOL], "max_tokens": 200}
    with scripted_engine(reply) as engine, openai_client(engine) as c:
        choice = ask(c, messages=PRODUCT, **given).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content.strip() == "Let me see."
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"expression": "31 * 44"}
        deltas = [part.choices[0] for part in ask(c, messages=PRODUCT, **given, stream=True)]
        streamed = [call for delta in deltas for call in delta.delta.tool_calls or ()]
        names = [(each.function.name, bool(each.id), each.index) for each in streamed]
        assert names == [("calculate", True, 0), *[(None, False, 0)] * (len(names) - 1)]
        pieces = [each.function.arguments for each in streamed]
        assert len(pieces) > 1
        assert "".join(pieces) == call.function.arguments
        with c.chat.completions.stream(model="adafuse", messages=PRODUCT, **given) as stream:
            (summed,) = stream.get_final_completion().choices[0].message.tool_calls or []
        assert (summed.function.name, summed.function.arguments) == ("calculate", "".join(pieces))
        assert deltas[-1].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "1364"}
        history = [*PRODUCT, choice.message.model_dump(), result]
        answered = ask(c, messages=history, **given).choices[0]
        assert (answered.message.content, answered.finish_reason) == ("It is 1364.", "stop")
        chosen = {"type": "function", "function": {"name": "calculate"}}
        forced = ask(c, messages=history, tool_choice=chosen, **given).choices[0]
        assert forced.message.tool_calls[0].function.name == "calculate"


def test_an_invalid_call_in_a_stream_never_looks_whole():
    twice = CALL.replace('"31 * 44"', '"31 * 44", "a": 1, "expression": "2"')
    parameters = {**CALCULATE["parameters"], "additionalProperties": True}
    tool = {"type": "function", "function": {**CALCULATE, "parameters": parameters}}
    with scripted_engine(lambda _: f"{CALL}\n{twice}") as engine, openai_client(engine) as c:
        given: Any = {"messages": PRODUCT, "tools": [tool], "max_tokens": 200}
        deltas = [part.choices[0] for part in ask(c, **given, stream=True)]
    pieces = [call for delta in deltas for call in delta.delta.tool_calls or ()]
    broken = "".join(piece.function.arguments for piece in pieces if piece.index == 1)
    assert broken.endswith("]")
    assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize("enforce", ["auto", False])
def test_a_call_that_the_limit_cuts_is_left_out_or_broken(enforce):
    both = f"{CALL}\n{CALL.replace('44', '44 * ' * 40)}"
    extra: Any = {"extra_body": {"adafuse": {"enforce": enforce}}}
    with scripted_engine(lambda _: both) as engine, openai_client(engine) as c:
        given = {"messages": PRODUCT, "tools": [TOOL], "max_tokens": 180, **extra}
        done = ask(c, **given)
        assert done.choices[0].finish_reason == "length"
        assert not done.choices[0].message.content
        assert len(done.choices[0].message.tool_calls) == 1
        assert "max_tokens" in str(done.adafuse["warnings"])
        deltas = [part.choices[0] for part in ask(c, **given, stream=True)]
        arguments = {0: "", 1: ""}
        for piece in (piece for delta in deltas for piece in delta.delta.tool_calls or ()):
            arguments[piece.index] += piece.function.arguments
        assert arguments[0] == done.choices[0].message.tool_calls[0].function.arguments
        assert arguments[1].endswith('"]') is (enforce == "auto")
        assert deltas[-1].finish_reason == "length"
        tools: Any = [{"type": "function", **CALCULATE}]
        given = {"input": PRODUCT, "tools": tools, "max_output_tokens": 180, **extra}
        *_, last = c.responses.create(model="adafuse", stream=True, **given)
        assert last.response.incomplete_details.reason == "max_output_tokens"
        calls = [each for each in last.response.output if each.type == "function_call"]
        assert [each.status for each in calls] == ["completed", "incomplete"][
            : 1 + bool(arguments[1])
        ]


class Price(BaseModel):
    florins: int
    reduced: bool


def test_structured_output_fits_the_schema(client):
    parsed = client.chat.completions.parse(
        model="adafuse", messages=QUESTION, response_format=Price, max_tokens=80
    )
    assert isinstance(parsed.choices[0].message.parsed, Price)
    response = client.responses.parse(model="adafuse", input=QUESTION, text_format=Price)
    assert isinstance(response.output_parsed, Price)


def test_a_form_that_cannot_be_enforced_is_described_or_refused(client):
    schema = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/a.json"}}}
    named = {"name": "x", "schema": schema}
    described = ask(client, response_format={"type": "json_schema", "json_schema": named})
    (warning,) = described.model_extra["adafuse"]["warnings"]
    assert "not enforced" in warning
    strict = {"type": "json_schema", "json_schema": {**named, "strict": True}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, response_format=strict)
    assert caught.value.param == "response_format"


def test_reasoning_is_apart_from_the_answer():
    script = "<think>\nThree is few.\n</think>\n\nFour."
    with thinkers("qwen", script=lambda _: script) as engine, openai_client(engine) as client:
        message = ask(client, max_tokens=100).choices[0].message
        streamed = [part.choices[0].delta for part in ask(client, max_tokens=100, stream=True)]
    assert message.content == "Four."
    assert message.model_extra["reasoning_content"].strip() == "Three is few."
    assert "".join(delta.content or "" for delta in streamed) == "Four."


def extension(**fields: Any) -> dict[str, Any]:
    return {"extra_body": {"adafuse": fields}}


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("model", {"model": "gpt-9"}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "usr", "content": "x"}]}),
        ("messages.0.name", {"messages": [{"role": "user", "content": "x", "name": 1}]}),
        ("max_tokens", {"max_tokens": 401}),
        ("n", {"n": 3}),
        ("logit_bias", {"extra_body": {"logit_bias": {" the": 101}}}),
        ("top_k", {"extra_body": {"top_k": -3}}),
        ("adafuse.max_wrds", extension(max_wrds=3)),
        ("adafuse.use", extension(use=["nobody"])),
        ("adafuse.use", {"model": "wren", **extension(use=["heron"])}),
        ("max_tokens", extension(max_new_tokens=3)),
        ("tool_choice", {"tools": [TOOL], "tool_choice": "add"}),
        ("tool_choice", {"tool_choice": "required"}),
        (
            "adafuse.regex",
            {"response_format": {"type": "json_object"}, **extension(regex="[0-9]")},
        ),
    ],
)
def test_an_error_names_the_field(client, param, changes):
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, **changes)
    assert caught.value.status_code == (404 if param == "model" else 400)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_that_is_too_long_has_the_code_that_frameworks_look_for(client):
    for size in (10_000, 20_000):  # above the window, and above the server's limit of characters
        with pytest.raises(openai.BadRequestError, match="exceeds the context window") as caught:
            ask(client, messages=[{"role": "user", "content": "mill " * size}])
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
