"""Conversations rendered with the chat templates of all model families."""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jinja2
import pytest

from adafuse_llm import AdaFuseEngine, InvalidInputError
from adafuse_llm.adapters.conversation import Call, to_messages
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.text import codec
from adafuse_llm.text.chat import Tool, merge_turns
from adafuse_llm.text.codec import TokenizerCodec
from tests.support.models import Recipe, model, tokenizer
from tests.support.templates import FAMILIES, family_tokenizer

CALL: Call = {"id": "1", "name": "add", "arguments": {"a": 1}}
ADD = Tool("add", "Adds up.", {"type": "object", "properties": {"a": {"type": "number"}}})


def turns(spec: str, fill: str = "{}") -> list[Any]:
    """Return messages by their roles: ``"su"`` is a system and a user message.

    The text of each message is a unique word, inserted into `fill`.
    """
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [
        {"role": roles[letter], "content": fill.format(f"{letter}{number}.")}
        for number, letter in enumerate(spec)
    ]


SHAPES = ("u", "su", "uau", "suau", "usu", "usau", "uasu", "ssu", "suasu", "us", "s")
REPEATS = ("uu", "suu", "uaau", "suaauu", "au", "sau", "aau")

HISTORIES: dict[str, list[Any]] = {shape: turns(shape) for shape in (*SHAPES, *REPEATS)}
HISTORIES |= {
    "spaces": turns("suau", "\n  {}  two\n\nlines \n"),
    "emoji": turns("suau", "{} \U0001f600 中文"),
    "lists": [
        {"role": "system", "content": ["s0.", {"type": "text", "text": " more"}]},
        {"role": "user", "content": [{"type": "text", "text": "u1."}, {"text": " more"}]},
    ],
    "empty user": [*turns("ua"), {"role": "user", "content": ""}],
    "empty assistant": [*turns("u"), {"role": "assistant", "content": None}, *turns("uu")[1:]],
    "empty system": [{"role": "system", "content": ""}, *turns("u")],
    "names": to_messages([turn | {"name": "Anna"} for turn in turns("suauu")]),
    "tools": to_messages(
        [
            *turns("su"),
            {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "2"}]},
            {"role": "tool", "tool_call_id": "1", "content": "one"},
            {"role": "tool", "tool_call_id": "2", "content": "two\nlines"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\na5."},
            {"role": "user", "content": "u6."},
        ],
        tools=[ADD],
        instructions="In JSON.",
    ),
    "tools without a system message": to_messages(
        [
            *turns("u"),
            {"role": "assistant", "content": "a1.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": ""},
        ],
        tools=[ADD],
        tool_choice="add",
    ),
    "tool role": [*turns("ua"), {"role": "tool", "content": "t2."}, *turns("suaau")[3:]],
}


PAIRS = [
    (name, (*HISTORIES, *HISTORIES)[number + shift])
    for number, name in enumerate(FAMILIES)
    for shift in (0, 10, 20)
]
"""Three conversations for each family, so that each conversation occurs."""


def test_each_conversation_occurs() -> None:
    assert {history for _, history in PAIRS} == {*HISTORIES}


def squeezed(text: str) -> str:
    return " ".join(text.split())


def encoded(name: str, messages: list[Any]) -> tuple[list[int], str]:
    known = family_tokenizer(name)
    ids = TokenizerCodec(known).encode_messages(messages)
    return ids, known.decode(ids)


def control_of(name: str, ids: list[int]) -> list[str]:
    known = family_tokenizer(name)
    return [known.decode([token]) for token in ids if token in known.added_tokens_decoder]


@pytest.mark.parametrize(("name", "history"), PAIRS)
def test_every_conversation_is_rendered_with_all_of_its_words(name, history):
    family, messages = FAMILIES[name], HISTORIES[history]
    ids, text = encoded(name, messages)
    rest, words = squeezed(text), []
    for message in messages:
        content = message["content"] or ""
        if not isinstance(content, str):
            content = "".join(part if isinstance(part, str) else part["text"] for part in content)
        words.append((message["role"], squeezed(content)))
        assert words[-1][1] in rest
    moved = ("system",) if family.system in ("first", "last") else ()
    for role, content in words:
        if role not in moved:
            rest = rest[rest.index(content) + len(content) :]
    if family.bos is not None and family.bos != family.eos:
        users = text.count("[INST]")
        expected = {"never": 0, "once": 1, "every user's turn": users}[family.writes_bos]
        assert control_of(name, ids).count(family.bos) == expected


@pytest.mark.parametrize(("name", "history"), PAIRS)
def test_control_tokens_in_messages_are_plain_text(name, history):
    family, messages = FAMILIES[name], HISTORIES[history]
    spelled = [token for token in (family.bos, family.eos, *family.control) if token]
    hostile = [
        {**message, "content": "\n".join(f"x{token}y" for token in spelled)}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]
    harmless = [
        {**message, "content": "words"} if isinstance(message["content"], str) else message
        for message in messages
    ]
    ids, text = encoded(name, hostile)
    assert control_of(name, ids) == control_of(name, encoded(name, harmless)[0])
    for message in hostile:
        if isinstance(message["content"], str):
            assert squeezed(message["content"]) in squeezed(text)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_templates_have_the_properties_of_their_families(name):
    family, known = FAMILIES[name], family_tokenizer(name)

    def render(messages):
        if family.parts:
            parts = [[{"type": "text", "text": message["content"]}] for message in messages]
            messages = [{**m, "content": p} for m, p in zip(messages, parts, strict=True)]
        return known.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    plain = known.apply_chat_template(turns("u"), tokenize=False)
    assert ("u0." not in plain) == family.parts
    if family.system == "raises":
        with pytest.raises(jinja2.TemplateError):
            render(turns("su"))
    else:
        assert "s0." in render(turns("suau"))
    late = render(turns("uasu")) if not family.alternates else ""
    assert ("s2." in late) == (not family.alternates and family.system != "lost")
    if family.alternates:
        with pytest.raises(jinja2.TemplateError, match="turns"):
            render(turns("uu"))
    else:
        assert "u1." in render(turns("uu"))
    tool = [*turns("ua"), {"role": "tool", "content": "t2."}]
    if not family.alternates:
        assert ("t2." in render(tool)) == family.tools
    assert family.adds_bos == (known.encode("x")[0] == known.bos_token_id)


def test_a_system_message_in_the_middle_stays_if_the_template_accepts_it():
    _, text = encoded("llama3", turns("uasu"))
    assert text.index("u0.") < text.index("s2.") < text.index("u3.")
    assert "<|start_header_id|>system" in text


@pytest.mark.parametrize("name", ["llama2", "mistral-3", "command-r", "vicuna"])
def test_the_first_system_message_stays_if_only_later_ones_are_rejected(name):
    _, text = encoded(name, turns("suasu"))
    merged = [*turns("sua"), {"role": "user", "content": "s3.\n\nu4."}]
    assert text == encoded(name, merged)[1]


def test_an_omitted_message_is_detected_though_its_words_occur_elsewhere():
    messages = [{"role": role, "content": "ok"} for role in ("user", "assistant", "tool")]
    for name in ("phi3", "zephyr"):
        assert encoded(name, messages)[1].count("ok") == 3


def test_turns_are_merged_only_if_necessary():
    (users,) = merge_turns(turns("uu"))
    assert users["content"] in encoded("gemma", turns("uu"))[1]
    assert users["content"] not in encoded("qwen", turns("uu"))[1]


def test_a_template_that_renders_no_message_is_an_error():
    known = copy.deepcopy(family_tokenizer("qwen"))
    known.chat_template = "Hello"
    with pytest.raises(InvalidInputError, match="omits every message"):
        TokenizerCodec(known).encode_messages(turns("uu"))


ENDLESS = (
    "{% if 'loop' in messages[-1].content %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def endless_codec():
    known = copy.deepcopy(family_tokenizer("qwen"))
    known.chat_template = ENDLESS
    return TokenizerCodec(known)


def test_an_endless_template_is_stopped(monkeypatch):
    monkeypatch.setattr(codec, "RENDER_SECONDS", 0.3)
    endless, before = endless_codec(), set(threading.enumerate())
    started = time.monotonic()
    with pytest.raises(InvalidInputError, match=r"was stopped.*more than 0.3 seconds.*loops"):
        endless.encode_messages(turns("u", "loop {}"))
    assert time.monotonic() - started < 5
    for thread in set(threading.enumerate()) - before:
        thread.join(5)  # its loop is interrupted
        assert not thread.is_alive()
    assert endless.encode_messages(turns("u"))


def test_an_endless_template_blocks_no_other_thread(monkeypatch):
    monkeypatch.setattr(codec, "RENDER_SECONDS", 1.0)
    endless = endless_codec()
    context = endless.encode_prompt("The ferry")
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(endless.encode_messages, turns("u", "loop {}"))
        time.sleep(0.2)
        assert endless.encode_messages(turns("u"))
        tokens, exact = endless.encode_continuation(context, " to Orrin")
        assert exact
        assert endless.decode_continuation(context, tokens) == " to Orrin"
        assert endless.encode_prompt("The ferry") == context
        assert not stuck.done()
        assert isinstance(stuck.exception(), InvalidInputError)


@pytest.mark.slow
def test_an_endless_template_does_not_delay_requests_of_the_same_engine(monkeypatch):
    monkeypatch.setattr(codec, "RENDER_SECONDS", 1.5)
    recipe = Recipe("llama", seed=5)
    known = copy.deepcopy(tokenizer(recipe.kind))
    known.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    render = known.apply_chat_template

    def endless(messages, **options):
        while "loop" in messages[-1]["content"]:
            time.sleep(0.001)  # leaves Python's lock to the passes, which it would slow down
            sum(range(10_000))
        return render(messages, **options)

    monkeypatch.setattr(known, "apply_chat_template", endless)
    member = HuggingFaceBackend(model(recipe), known, "looping")
    with AdaFuseEngine([member]) as engine, ThreadPoolExecutor(1) as pool:
        expected = engine.generate("The ferry", max_new_tokens=3).text
        stuck = pool.submit(engine.generate, messages=turns("u", "loop {}"))
        time.sleep(0.2)
        assert engine.generate("The ferry", max_new_tokens=3).text == expected
        assert engine.generate(messages=turns("u"), max_new_tokens=3).rounds
        assert not stuck.done()
        with pytest.raises(InvalidInputError, match=r"member 'looping'.*chat template"):
            stuck.result()
        assert engine.generate("The ferry", max_new_tokens=3).text == expected
