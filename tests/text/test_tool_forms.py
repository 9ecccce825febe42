"""Conversations with tools in the forms of chat templates that support them."""

from __future__ import annotations

import asyncio
import copy
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.adafuse._messages import to_turns

from adafuse_llm import AdaFuseEngine, InvalidInputError
from adafuse_llm.adapters.conversation import to_conversation
from adafuse_llm.backends.fake import FakeCodec
from adafuse_llm.backends.huggingface import HuggingFaceBackend
from adafuse_llm.text import codec
from adafuse_llm.text.chat import Tool, default_system
from adafuse_llm.text.codec import TokenizerCodec, encode_conversation
from adafuse_llm.text.conversation import (
    AUTO,
    HOW_TO_CALL,
    NAMED,
    ONLY_THIS_FORM,
    REQUIRED,
    Conversation,
    check_conversation,
)
from adafuse_llm.text.tool_forms import ToolForm
from tests.support.models import Recipe, model, tokenizer
from tests.support.templates import FAMILIES, TOOL_FAMILIES, family_tokenizer

ADD = Tool("add", "Adds up.", {"type": "object", "properties": {"a": {"type": "number"}}})
LOOK = Tool("look_up", "Says what is known.", {})

FORMS = {
    "qwen2.5": ToolForm(is_common=True),
    "qwen3": ToolForm(is_common=True),
    "hermes": ToolForm("own message", is_common=True),
    "llama3.1": ToolForm("own message", is_parallel=False),
    "mistral-3-tools": ToolForm("omitted"),
    "deepseek-3": ToolForm("own message", has_json_text=True),
}

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

AFTER: list[Any] = [
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Thanks."},
]


@pytest.fixture(scope="module")
def codecs() -> dict[str, TokenizerCodec]:
    return {name: TokenizerCodec(family_tokenizer(name)) for name in TOOL_FAMILIES}


def rendered(name: str, conversation: Conversation) -> str:
    known = family_tokenizer(name)
    return str(known.decode(TokenizerCodec(known).encode_conversation(conversation)))


def flattened(name: str, conversation: Conversation) -> str:
    known = family_tokenizer(name)
    return str(known.decode(TokenizerCodec(known).encode_messages(conversation.flat())))


def test_the_form_of_each_family(codecs: dict[str, TokenizerCodec]) -> None:
    assert {name: codecs[name].tool_form for name in TOOL_FAMILIES} == FORMS


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "idefics"])
def test_members_without_a_form_read_plain_messages(name: str) -> None:
    conversation = check_conversation([*HISTORY, *AFTER], [ADD, LOOK])
    assert TokenizerCodec(family_tokenizer(name)).tool_form is None
    assert rendered(name, conversation) == flattened(name, conversation)


def test_codecs_without_templates_read_plain_messages() -> None:
    conversation = check_conversation(HISTORY, [ADD, LOOK])
    fake = FakeCodec()
    text = fake.decode(encode_conversation(fake, conversation))
    assert text == fake.decode(fake.encode_messages(conversation.flat()))
    assert "<tool_response>" in text
    bare = copy.deepcopy(family_tokenizer("qwen2.5"))
    bare.chat_template = None
    plain = TokenizerCodec(bare)
    assert plain.encode_conversation(conversation) == plain.encode_messages(conversation.flat())


ADD_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)

CHATML_CALLS = (
    f'<tool_call>\n{{"name": "add", "arguments": {ADD_JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call><|im_end|>\n'
)
CHATML_RESULTS = (
    "<|im_start|>user\n<tool_response>\nno <b>one\n</tool_response>\n"
    "<tool_response>\n3\n</tool_response><|im_end|>\n"
)
QWEN = (
    "<|im_start|>user\nAdd, and look up.<|im_end|>\n<|im_start|>assistant\nI will.\n"
    f"{CHATML_CALLS}{CHATML_RESULTS}<|im_start|>assistant\n"
)

TURNS = {
    "qwen2.5": QWEN,
    "qwen3": QWEN,
    "hermes": "<|im_start|>user\nAdd, and look up.<|im_end|>\n"
    "<|im_start|>assistant\nI will.<|im_end|>\n"
    f"<|im_start|>assistant\n{CHATML_CALLS}"
    '<|im_start|>tool\n<tool_response>\n{"name": "look_up", "content": "no <b>one"}\n'
    '</tool_response>\n<tool_response>\n{"name": "add", "content": "3"}\n'
    "</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3.1": "Add, and look up.<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nI will.<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    f'{{"name": "add", "parameters": {ADD_JSON}}}<|eot_id|>'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "look_up", "parameters": {}}<|eot_id|>'
    '<|start_header_id|>ipython<|end_header_id|>\n\n"no <b>one"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral-3-tools": "Add, and look up.[/INST][TOOL_CALLS] "
    f'[{{"name": "add", "arguments": {ADD_JSON}, "id": "call00001"}}, '
    '{"name": "look_up", "arguments": {}, "id": "call00002"}]</s>'
    '[TOOL_RESULTS] {"content": no <b>one, "call_id": "call00002"}[/TOOL_RESULTS]'
    '[TOOL_RESULTS] {"content": 3, "call_id": "call00001"}[/TOOL_RESULTS]',
    "deepseek-3": "<｜User｜>Add, and look up.<｜Assistant｜>I will.<｜end▁of▁sentence｜>"
    f"<｜Assistant｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n{ADD_JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n{}<｜tool▁call▁end｜>"
    "<｜end▁of▁sentence｜>"
    "<｜tool▁output▁begin｜>no <b>one<｜tool▁output▁end｜>"
    "<｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜Assistant｜>",
}


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_calls_and_results_have_the_form_of_the_template(name: str) -> None:
    text = rendered(name, check_conversation(HISTORY, [ADD, LOOK]))
    assert text.endswith(TURNS[name])
    before = text.removesuffix(TURNS[name])
    assert "Be brief." in before
    assert "Adds up." in before
    assert "Says what is known." in before


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_later_turns_follow(name: str) -> None:
    text = rendered(name, check_conversation([*HISTORY, *AFTER], [ADD, LOOK], "required"))
    assert text.index("look_up") < text.index("It is 3.") < text.index("Thanks.")
    assert "[TOOL_CALLS]" in text or "[INST]" not in text
    assert REQUIRED in text


@pytest.mark.parametrize(
    ("choice", "request_"),
    [("auto", ""), ("required", REQUIRED), ("look_up", NAMED.format(name="look_up"))],
)
@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_members_are_told_the_common_form_where_their_own_differs(
    name: str, choice: str, request_: str
) -> None:
    for turns in (HISTORY[:2], HISTORY[1:2], HISTORY, HISTORY[1:]):
        text = rendered(name, check_conversation(turns, [ADD, LOOK], choice))
        assert not request_ or text.count(request_) == 1
        assert AUTO not in text
        assert text.count(HOW_TO_CALL + ONLY_THIS_FORM) == (not FORMS[name].is_common)
        assert "# Tools\n\nYou have these tools" not in text


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_instructions_follow_the_tools(name: str) -> None:
    conversation = check_conversation(HISTORY, [ADD, LOOK], instructions="In French.")
    before = "Be brief." if FORMS[name].is_common else ONLY_THIS_FORM
    assert f"{before}\n\nIn French." in rendered(name, conversation)
    asked = check_conversation(HISTORY, [ADD, LOOK], "required", instructions="In French.")
    assert f"{REQUIRED}\n\nIn French." in rendered(name, asked)


SCHEMA = {
    "required": ["a"],
    "properties": {"a": {"description": "The first.", "type": "number"}},
    "title": "Sum",
    "type": "object",
}
"""A schema in which the type is not the first key."""

OPENAI_TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
    for name, description, parameters in (
        ("add", "Adds up.", SCHEMA),
        ("look_up", "", {"type": "object"}),
    )
]


CALM: list[Any] = [
    *HISTORY[:2],
    {
        **HISTORY[2],
        "tool_calls": [{**call, "arguments": {"b": "é"}} for call in HISTORY[2]["tool_calls"]],
    },
    *HISTORY[3:],
]
"""The history without the spelling of a control token, which would stay text."""


def own_rendering(name: str, turns: list[Any]) -> list[int]:
    """The tokens that the family's own template makes of a conversation."""
    nested = [
        {
            **turn,
            "tool_calls": [
                {"id": c["id"], "type": "function", "function": c} for c in turn["tool_calls"]
            ],
        }
        if "tool_calls" in turn
        else turn
        for turn in turns
    ]
    known = family_tokenizer(name)
    tokens = known.apply_chat_template(
        nested, tools=OPENAI_TOOLS, add_generation_prompt=True, return_dict=False
    )
    return list(tokens)


@pytest.mark.parametrize("turns", [CALM[1:2], CALM[:2], CALM, [*CALM[1:], *AFTER]])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_r3_with_automatic_calls_the_prompt_is_what_the_template_makes(
    codecs: dict[str, TokenizerCodec], name: str, turns: list[Any]
) -> None:
    conversation = check_conversation(turns, OPENAI_TOOLS)
    assert codecs[name].encode_conversation(conversation) == own_rendering(name, turns)


def test_r3_a_template_that_needs_whole_schemas_gets_them() -> None:
    old = "{{- '\n' + tool | tojson }}"
    made = changed("qwen2.5", old, f"{{{{- tool.function.parameters.properties.a }}}}{old}")
    assert made.tool_form is not None
    picky = changed(
        "qwen2.5",
        old,
        f"{{% if not tool.function.parameters.properties is defined %}}"
        f"{{{{- raise_exception('no properties') }}}}{{% endif %}}{old}",
    )
    conversation = check_conversation(HISTORY[1:2], OPENAI_TOOLS)
    tokens = picky.encode_conversation(conversation)
    text = str(family_tokenizer("qwen2.5").decode(tokens))
    assert '"parameters": {"type": "object", "properties": {}}' in text
    assert "<tools>" in text


DEFAULT = "You are a helper."
"""The default system text of the family `qwen`."""


@pytest.mark.parametrize(
    ("choice", "added"),
    [("auto", AUTO), ("required", REQUIRED), ("add", NAMED.format(name="add"))],
)
def test_r3_the_default_system_text_stays_without_a_template_for_tools(
    choice: str, added: str
) -> None:
    text = rendered("qwen", check_conversation(HISTORY[1:2], [ADD], choice))
    assert text.count("system\n") == 1
    assert f"system\n{DEFAULT}\n\n# Tools\n" in text
    assert f" {added}<|im_end|>" in text
    given = rendered("qwen", check_conversation(HISTORY[:2], [ADD], choice))
    assert "system\nBe brief.\n\n# Tools\n" in given
    assert DEFAULT not in given


def test_r3_the_default_system_text_stays_before_instructions() -> None:
    text = rendered("qwen", check_conversation(HISTORY[1:2], instructions="In JSON."))
    assert f"system\n{DEFAULT}\n\nIn JSON.<|im_end|>" in text


@pytest.mark.parametrize(
    ("choice", "added"), [("required", REQUIRED), ("add", NAMED.format(name="add"))]
)
def test_r3_the_default_system_text_stays_in_a_template_for_tools(choice: str, added: str) -> None:
    start = "{%- if messages[0].role != 'system' %}{%- set messages = [{'role': 'system', "
    start += f"'content': '{DEFAULT}'}}] + messages %}}{{% endif %}}"
    known = copy.deepcopy(family_tokenizer("qwen2.5"))
    known.chat_template = start + known.chat_template
    made = TokenizerCodec(known)
    conversation = check_conversation(HISTORY[1:2], [ADD], choice, instructions="In JSON.")
    text = str(known.decode(made.encode_conversation(conversation)))
    assert f"{DEFAULT}\n\n{added}\n\nIn JSON." in text
    assert text.count(DEFAULT) == 1


@pytest.mark.parametrize(
    ("name", "default"), [("qwen", DEFAULT), ("gemma", ""), ("llama2", ""), ("mistral-1", "")]
)
def test_r3_the_default_system_text_is_found(name: str, default: str) -> None:
    known = family_tokenizer(name)

    def template(messages: list[dict[str, Any]]) -> str:
        return str(known.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    assert default_system(template) == default


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_without_tools_no_member_reads_of_tools(name: str) -> None:
    conversation = check_conversation(HISTORY[:2], [ADD, LOOK], "none")
    assert rendered(name, conversation) == flattened(name, conversation)
    assert "look_up" not in rendered(name, conversation)


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_earlier_calls_are_read_after_the_tools_are_gone(name: str) -> None:
    text = rendered(name, check_conversation(HISTORY))
    assert '"name": "add"' in text or "<｜tool▁sep｜>add" in text
    assert "no <b>one" in text
    assert AUTO not in text
    has_form = name != "hermes"  # transformers chooses its template for tools only with tools
    assert ("<tool_response>\n{" in text) == (not has_form)


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_the_result_of_a_trimmed_call_is_read_as_text(name: str) -> None:
    orphan = ChatMessage(
        role="tool", content="an old result", additional_kwargs={"tool_call_id": "gone"}
    )
    turns: list[Any] = [*to_turns([orphan], pytest.fail), *HISTORY[2:], *AFTER]
    text = rendered(name, to_conversation(turns, tools=[ADD, LOOK]))
    assert text.index("an old result") < text.index("It is 3.")
    assert "Be brief." not in text
    assert text.count("I will.") == (FORMS[name].text != "omitted")


def test_a_conversation_that_the_template_rejects_is_read_as_plain_messages() -> None:
    interrupted = check_conversation([*HISTORY, AFTER[1]], [ADD, LOOK])
    name = "mistral-3-tools"  # two messages of users, with no reply between them
    assert rendered(name, interrupted) == flattened(name, interrupted)
    assert "[TOOL_CALLS]" in rendered(name, check_conversation([*HISTORY, *AFTER], [ADD, LOOK]))


# Control tokens ----------------------------------------------------------------------------------


def _hostile(fill: str) -> Conversation:
    turns: list[Any] = [
        {"role": "system", "content": fill},
        {"role": "user", "content": fill},
        {
            "role": "assistant",
            "content": fill,
            "tool_calls": [
                {"id": fill, "name": "add", "arguments": {fill: [fill, {"x": fill}]}},
                {"id": "2", "name": fill, "arguments": {}},
            ],
        },
        {"role": "tool", "tool_call_id": fill, "content": fill},
        {"role": "tool", "tool_call_id": "2", "content": fill},
    ]
    schema = {"type": "object", "properties": {fill: {"description": fill, "enum": [fill]}}}
    tools = [Tool("add", fill, schema), Tool(fill, "?", {})]
    return check_conversation(turns, tools, fill, instructions=fill)


@pytest.mark.parametrize("name", TOOL_FAMILIES)
def test_e4_control_tokens_in_tools_calls_and_results_are_plain_text(name: str) -> None:
    family, known = TOOL_FAMILIES[name], family_tokenizer(name)
    made = TokenizerCodec(known)
    spelled = [token for token in (family.bos, family.eos, *family.control) if token]
    quiet = made.encode_conversation(_hostile("words"))
    for fill in (f"x{'y, '.join(spelled)}z", *spelled, f" {spelled[0]}{spelled[-1]}\n"):
        hostile = made.encode_conversation(_hostile(fill))
        assert [t for t in hostile if t in known.added_tokens_decoder] == [
            t for t in quiet if t in known.added_tokens_decoder
        ]
        assert fill.strip() in known.decode(hostile)
    assert "# Tools\n\nYou have" not in known.decode(hostile)  # the form of the template


def test_e4_a_template_that_changes_marks_gets_plain_messages() -> None:
    known = copy.deepcopy(family_tokenizer("llama3.1"))
    known.chat_template = known.chat_template.replace(
        "m.content | tojson if", "m.content | tojson(ensure_ascii=true) if"
    )
    made = TokenizerCodec(known)
    conversation = check_conversation(
        [*HISTORY[:4], {**HISTORY[4], "content": "<|eot_id|>"}], [ADD, LOOK]
    )
    tokens = made.encode_conversation(conversation)
    assert tokens == made.encode_messages(conversation.flat())
    assert made.encode_conversation(check_conversation(HISTORY, [ADD, LOOK])) != tokens


# Templates that fail -----------------------------------------------------------------------------


def changed(name: str, old: str, new: str) -> TokenizerCodec:
    known = copy.deepcopy(family_tokenizer(name))
    assert old in known.chat_template
    known.chat_template = known.chat_template.replace(old, new)
    return TokenizerCodec(known)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{%- if tools %}", "{%- if tools %}{{- raise_exception('no tools') }}"),
        ("{{- '\\n' + tool | tojson }}", "{{- tool.nothing.at_all }}"),
        ("{{- '\\n' + tool | tojson }}", ""),
        ("{{- call.arguments | tojson }}", ""),
        ("{{- call.arguments | tojson }}", "{{- call.arguments | tojson | tojson }}"),
        ("m.content + '\\n</tool_response>'", "'\\n</tool_response>'"),
        ('\'", "arguments": \'', "m.nothing.at_all"),
    ],
)
def test_templates_that_fail_with_tools_get_plain_messages(old: str, new: str) -> None:
    made = changed("qwen2.5", old.replace("\\n", "\n"), new)
    conversation = check_conversation(HISTORY, [ADD, LOOK])
    assert made.tool_form is None
    assert made.encode_conversation(conversation) == made.encode_messages(conversation.flat())


def test_a_template_that_fails_with_one_conversation_gets_plain_messages() -> None:
    made = changed(
        "qwen2.5",
        "{%- if m.role == 'tool' %}",
        "{%- if m.role == 'tool' and '3' == m.content %}{{- raise_exception('three') }}"
        "{%- elif m.role == 'tool' %}",
    )
    three = check_conversation(HISTORY, [ADD, LOOK])
    assert made.tool_form is not None
    assert made.encode_conversation(three) == made.encode_messages(three.flat())
    four = check_conversation([*HISTORY[:4], {**HISTORY[4], "content": "4"}], [ADD, LOOK])
    assert made.encode_conversation(four) != made.encode_messages(four.flat())


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("condition", ["tools", "messages[-1].content == '3'"])
def test_a_template_that_is_endless_with_tools_is_refused_with_them_only(
    monkeypatch: pytest.MonkeyPatch, condition: str
) -> None:
    monkeypatch.setattr(codec, "RENDER_SECONDS", 0.3)
    known = copy.deepcopy(family_tokenizer("qwen2.5"))
    known.chat_template = f"{{% if {condition} %}}{LOOPS}{{% endif %}}{known.chat_template}"
    made = TokenizerCodec(known)
    conversation = check_conversation(HISTORY, [ADD, LOOK])
    with pytest.raises(InvalidInputError, match="loops"):
        made.encode_conversation(conversation)
    assert made.encode_messages([{"role": "user", "content": "a"}])


def test_the_form_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = TokenizerCodec(family_tokenizer("llama3.1"))
    conversation = check_conversation(HISTORY, [ADD, LOOK])
    with ThreadPoolExecutor(4) as pool:
        tokens = list(pool.map(made.encode_conversation, [conversation] * 8))
    assert tokens == [tokens[0]] * 8
    monkeypatch.setattr(codec, "find_form", None)
    assert made.encode_conversation(conversation) == tokens[0]


# The engine --------------------------------------------------------------------------------------


def _member(name: str, template: str, seed: int) -> HuggingFaceBackend:
    recipe = Recipe("llama", seed=seed)
    known = copy.deepcopy(tokenizer(recipe.kind))
    known.chat_template = template
    return HuggingFaceBackend(model(recipe), known, name)


def test_each_member_of_an_engine_reads_its_own_form() -> None:
    turns = HISTORY[1:]
    conversation = check_conversation(turns, [ADD], "add")
    families = {name: TOOL_FAMILIES[name].template for name in ("mistral-3-tools", "qwen2.5")}
    families["gemma"] = FAMILIES["gemma"].template
    members = [_member(*each, seed) for seed, each in enumerate(families.items())]
    counts = {
        member.name: len(encode_conversation(member.codec, conversation)) for member in members
    }
    assert len(set(counts.values())) == 3
    with AdaFuseEngine(members) as engine:
        options: dict[str, Any] = {"tools": [ADD], "tool_choice": "add", "max_new_tokens": 2}
        result = engine.generate(messages=turns, **options)
        assert result.usage.prompt_tokens == counts
        (batched,) = engine.generate_batch(messages=[turns], **options)
        assert batched.text == result.text
        *_, last = engine.stream(messages=turns, **options)
        assert last.generation is not None
        assert last.generation.text == result.text
        assert asyncio.run(engine.agenerate(messages=turns, **options)).text == result.text
        assert engine.generate(messages=conversation, max_new_tokens=2).text == result.text
        options = {"tools": [ADD], "tool_choice": "add", "choices": ["yes", "no"]}
        chosen = engine.choose(messages=turns, **options)
        assert chosen.nll != engine.choose(messages=turns, choices=["yes", "no"]).nll
        assert asyncio.run(engine.achoose(messages=turns, **options)).nll == chosen.nll
        scores = engine.score(messages=turns, continuations=["yes", "no"], tools=[ADD])
        bare = engine.score(messages=turns, continuations=["yes", "no"])
        assert scores.texts[0].nll != bare.texts[0].nll
        with pytest.raises(InvalidInputError, match="need messages"):
            engine.generate("?", tools=[ADD])
        with pytest.raises(InvalidInputError, match="input 1 of the batch: message 0"):
            engine.generate_batch(messages=[turns, [{"role": "user", "tool_calls": [{}]}]])
