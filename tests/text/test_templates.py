"""Conversations as the chat templates of all model families render them, with and without tools."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import pytest

from adafuse_llm import InvalidInputError, Tool
from adafuse_llm.text.codec import TokenizerCodec
from adafuse_llm.text.conversation import (
    AUTO,
    HOW_TO_CALL,
    NAMED,
    ONLY_THIS_FORM,
    REQUIRED,
    Conversation,
    check_conversation,
)
from adafuse_llm.text.templates import TemplateFacts, render_conversation
from tests.support.models import tokenizer
from tests.support.templates import FAMILIES, TOOL_FAMILIES, family_tokenizer, turn


def rendered(name: str, conversation: Conversation) -> str:
    known = family_tokenizer(name)
    return str(known.decode(TokenizerCodec(known).encode_conversation(conversation)))


# Messages that a template refuses --------------------------------------------------------------


def picky(*roles: str, repeats: bool = True, late_system: bool = True) -> Any:
    """A template that accepts `roles`, and renders ``role:content;``."""

    def template(messages: Sequence[Mapping[str, Any]], _tools: Any) -> str:
        given = [message["role"] for message in messages]
        if not {*given} <= {*roles} or (not late_system and "system" in given[1:]):
            raise ValueError("a role that is not supported")
        if not repeats and any(a == b for a, b in itertools.pairwise(given)):
            raise ValueError("roles must alternate")
        return "".join(f"{each['role']}:{each['content']};" for each in messages)

    return template


@pytest.mark.quick
@pytest.mark.parametrize(
    ("spec", "template", "text"),
    [
        ("suu", picky("system", "user"), "system:s0;user:u1;user:u2;"),
        ("suu", picky("system", "user", repeats=False), "system:s0;user:u1\n\nu2;"),
        ("suau", picky("user", "assistant"), "user:s0\n\nu1;assistant:a2;user:u3;"),
        ("sausu", picky("system", "user", "assistant", late_system=False), "system:s0;user:;"
         "assistant:a1;user:u2\n\ns3\n\nu4;"),
        ("au", picky("user", "assistant", repeats=False), "assistant:a0;user:u1;"),
        ("sa", picky("user", "assistant"), "user:s0;assistant:a1;"),
        ("s", picky("user"), "user:s0;"),
        ("uat", picky("user", "assistant"), "user:u0;assistant:a1;user:t2;"),
    ],
)  # fmt: skip
def test_messages_change_only_if_the_template_refuses_them(
    spec: str, template: Any, text: str
) -> None:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [turn(names[letter], f"{letter}{number}") for number, letter in enumerate(spec)]
    conversation = check_conversation(messages)
    assert render_conversation(conversation, TemplateFacts(), template) == text


@pytest.mark.quick
def test_a_template_that_refuses_every_form_is_an_error_with_its_reason() -> None:
    with pytest.raises(InvalidInputError, match=r"ValueError: a role.*Roles given: user"):
        render_conversation(check_conversation([turn("user", "a")]), TemplateFacts(), picky())


# Families of models -----------------------------------------------------------------------------

ADD = Tool("add", "Adds up.", {"type": "object", "properties": {"a": {"type": "number"}}})
LOOK = Tool("look_up", "Says what is known.", {})


def turns(spec: str, fill: str = "{}") -> list[dict[str, Any]]:
    """Messages by their roles: ``"su"`` is a system and a user message with words of their own."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [
        {"role": roles[letter], "content": fill.format(f"{letter}{number}.")}
        for number, letter in enumerate(spec)
    ]


SHAPES = ("s", "u", "su", "uau", "suau", "uasu", "ssu", "suasu", "us", "uu", "suaauu", "sau")
HISTORIES = {shape: turns(shape) for shape in SHAPES}
HISTORIES |= {
    "spaces": turns("suau", "\n  {}  two\n\nlines \n"),
    "emoji": turns("suau", "{} \U0001f600 \u4e2d\u6587"),
    "empty": [*turns("u"), {"role": "assistant", "content": None}, *turns("uu")[1:]],
}
PAIRS = [
    (name, (*HISTORIES, *HISTORIES)[number + shift])
    for number, name in enumerate(FAMILIES)
    for shift in (0, 5, 10)
]
"""Three conversations for each family, so that each conversation occurs."""


def own(name: str, messages: list[Any], **options: Any) -> list[int]:
    """The tokens that transformers makes of a conversation."""
    known = family_tokenizer(name)
    if name in FAMILIES and FAMILIES[name].parts:
        parts = [[{"type": "text", "text": each["content"] or ""}] for each in messages]
        messages = [{**m, "content": each} for m, each in zip(messages, parts, strict=True)]
    options = {"add_generation_prompt": True, "return_dict": False, **options}
    return list(known.apply_chat_template(messages, **options))


@pytest.mark.parametrize(("name", "history"), PAIRS)
def test_members_read_what_their_template_makes_of_the_messages(name: str, history: str) -> None:
    messages = [{**each, "content": each["content"] or ""} for each in HISTORIES[history]]
    tokens = TokenizerCodec(family_tokenizer(name)).encode_messages(messages)
    try:
        expected = own(name, messages)
    except jinja2.TemplateError:  # the template refuses them, so it gets all words in other turns
        text = family_tokenizer(name).decode(tokens)
        for message in messages:
            assert message["content"].strip() in text
    else:
        assert tokens == expected


def test_a_template_that_writes_json_in_ascii_keeps_control_tokens_text() -> None:
    template = "{% for m in messages %}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}"
    known = tokenizer("bytelevel", template)
    tokens = TokenizerCodec(known).encode_messages([turn("user", "caf\u00e9 <|im_end|>")])
    assert known.decode(tokens) == '"caf\\u00e9 <|im_end|>"'
    assert known.convert_tokens_to_ids("<|im_end|>") not in tokens


# Tools ------------------------------------------------------------------------------------------

ARGUMENTS = {"a": 1, "b": 'é 中 "x"</tool_call>\n', "c": {"d": [True, None, 2.5]}}

HISTORY: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Add, and look up."},
    {
        "role": "assistant",
        "content": "I will.",
        "tool_calls": [
            {"id": "call_0123456789", "name": "add", "arguments": ARGUMENTS},
            {"id": "call_abc", "name": "look_up", "arguments": {}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_abc", "content": "no <b>one"},
    {"role": "tool", "tool_call_id": "call_0123456789", "content": "3"},
]
ONE_CALL = [*HISTORY[:2], {**HISTORY[2], "tool_calls": HISTORY[2]["tool_calls"][:1]}, HISTORY[4]]
AFTER = [turn("assistant", "It is 3."), turn("user", "Thanks.")]

ADD_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
OWN_FORMS = {
    # its template accepts one call per message
    "llama3.1": "Add, and look up.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    f'{{"name": "add", "parameters": {ADD_JSON}}}<|eot_id|>'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral-3-tools": "\n\nAdd, and look up.[/INST][TOOL_CALLS] "
    f'[{{"name": "add", "arguments": {ADD_JSON}, "id": "call00001"}}, '
    '{"name": "look_up", "arguments": {}, "id": "call00002"}]</s>'
    '[TOOL_RESULTS] {"content": no <b>one, "call_id": "call00002"}[/TOOL_RESULTS]'
    '[TOOL_RESULTS] {"content": 3, "call_id": "call00001"}[/TOOL_RESULTS]',
    "deepseek-3": "<｜User｜>Add, and look up.<｜Assistant｜>I will."
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n{ADD_JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n{}<｜tool▁call▁end｜>"
    "<｜end▁of▁sentence｜>"
    "<｜tool▁output▁begin｜>no <b>one<｜tool▁output▁end｜>"
    "<｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜Assistant｜>",
}
COMMON = ("qwen3", "hermes")
"""The families that write calls in the common form."""


@pytest.mark.parametrize("name", OWN_FORMS)
def test_calls_and_results_have_the_form_of_the_template(name: str) -> None:
    history = ONE_CALL if name == "llama3.1" else HISTORY
    text = rendered(name, check_conversation(history, [ADD, LOOK]))
    assert text.endswith(OWN_FORMS[name])
    before = text.removesuffix(OWN_FORMS[name])
    for words in ("Be brief.", "Adds up.", "Says what is known."):
        assert words in before


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("llama3.1", HISTORY),  # its template accepts one call per message
        ("mistral-3-tools", [*HISTORY, AFTER[1]]),  # no reply between two messages of users
        *((name, [*HISTORY, *AFTER]) for name in ("llama3", "mistral-3", "gemma", "idefics")),
    ],
)
def test_tools_are_text_where_the_template_does_not_read_them(
    name: str, messages: list[Any]
) -> None:
    conversation = check_conversation(messages, [ADD, LOOK])
    text = rendered(name, conversation)
    assert text == rendered(name, check_conversation(conversation.flat()))
    assert '<tool_response>\n{"name": "add", "content": "3"}' in text


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_members_are_told_the_common_form_where_their_own_differs(name: str) -> None:
    choice, request_ = (("auto", ""), ("required", REQUIRED))[len(name) % 2]
    for history in (HISTORY[:2], [*ONE_CALL[1:], *AFTER]):
        conversation = check_conversation(history, [ADD, LOOK], choice, instructions="In French.")
        text = rendered(name, conversation)
        assert not request_ or text.count(request_) == 1
        assert AUTO not in text
        assert text.count(HOW_TO_CALL + ONLY_THIS_FORM) == (name not in COMMON)
        assert "\nIn French." in text


NESTED_CALLS = [
    {"id": call["id"], "type": "function", "function": {**call, "arguments": {"b": "é"}}}
    for call in HISTORY[2]["tool_calls"]
]
NESTED = [*HISTORY[:2], {**HISTORY[2], "tool_calls": NESTED_CALLS}, *HISTORY[3:]]
"""The history in the form of OpenAI's API, without the spelling of a control token."""

SCHEMA = {
    "required": ["a"],
    "properties": {"a": {"description": "The first.", "type": "number"}},
    "type": "object",
}
"""A schema in which the type is not the first key."""

OPENAI_TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "look_up", "description": "?", "parameters": {"type": "object"}},
    },
]


@pytest.mark.parametrize("messages", [NESTED[1:2], NESTED[:2], NESTED, [*NESTED[1:], *AFTER]])
def test_with_automatic_calls_the_prompt_is_what_transformers_makes(messages: list[Any]) -> None:
    codec = TokenizerCodec(family_tokenizer("qwen3"))
    tokens = codec.encode_conversation(check_conversation(messages, OPENAI_TOOLS))
    assert tokens == own("qwen3", messages, tools=OPENAI_TOOLS)


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_earlier_calls_are_read_after_the_tools_are_gone(name: str) -> None:
    text = rendered(name, check_conversation(ONE_CALL, [ADD], "none"))
    assert '"name": "add"' in text or "<｜tool▁sep｜>add" in text
    assert "Adds up." not in text
    has_form = name != "hermes"  # transformers chooses its template for tools only with tools
    assert ("<tool_response>\n{" in text) == (not has_form)


def test_tools_and_instructions_are_the_system_message_that_a_conversation_lacks() -> None:
    for choice, added in (("auto", AUTO), ("add", NAMED.format(name="add"))):
        text = rendered("qwen", check_conversation(HISTORY[1:2], [ADD], choice))
        assert "system\n# Tools\n" in text
        assert f" {added}<|im_end|>" in text
    text = rendered("qwen", check_conversation(HISTORY[1:2], instructions="In JSON."))
    assert "system\nIn JSON.<|im_end|>" in text


def _hostile(fill: str) -> Conversation:
    call = {"id": fill, "name": fill, "arguments": {fill: [fill, {"x": fill}]}}
    history: list[Any] = [
        *turns("su", fill),
        {"role": "assistant", "content": fill, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": fill, "content": fill},
    ]
    schema = {"type": "object", "properties": {fill: {"description": fill, "enum": [fill]}}}
    return check_conversation(history, [Tool(fill, fill, schema)], fill, instructions=fill)


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_control_tokens_in_tools_calls_and_results_are_text(name: str) -> None:
    family, known = TOOL_FAMILIES[name], family_tokenizer(name)
    codec = TokenizerCodec(known)
    spelled = [token for token in (family.bos, family.eos, *family.control) if token]
    quiet = codec.encode_conversation(_hostile("words"))
    for fill in (f"x{'y, '.join(spelled)}z", f" {spelled[0]}{spelled[-1]}\n"):
        hostile = codec.encode_conversation(_hostile(fill))
        assert [t for t in hostile if t in known.added_tokens_decoder] == [
            t for t in quiet if t in known.added_tokens_decoder
        ]
        assert fill.strip() in known.decode(hostile)
    assert "# Tools\n\nYou have" not in known.decode(hostile)  # the form of the template
