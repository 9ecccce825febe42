"""Variables of chat templates, and where the replies of members that reason begin."""

import logging
from typing import Any

import pytest

from adafuse_llm import InvalidInputError, InvalidOptionError
from adafuse_llm.text.codec import TokenizerCodec
from adafuse_llm.text.conversation import check_conversation
from adafuse_llm.text.templates import ReplyStart, TemplateFacts
from tests.support.models import CHATML, STRICT, tokenizer
from tests.support.templates import FAMILIES, TOOL_FAMILIES, family_tokenizer
from tests.support.thinkers import (
    DEEPSEEK,
    GRANITE,
    QWEN,
    SMOL,
    codec,
    decoded,
    members_of,
    prompts,
    thinkers,
)

pytestmark = pytest.mark.quick

ASKED = [{"role": "user", "content": "Who <think> there?"}]
OFF = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "variables", "knows"),
    [
        (QWEN, {"enable_thinking", "said", "thought"}, True),
        (DEEPSEEK, set(), True),
        (SMOL, {"enable_thinking"}, True),
        (GRANITE, {"thinking"}, True),
        (None, set(), False),
        ({"default": CHATML, "tool_use": "{{ bos_token }}{{ documents }}"}, {"documents"}, False),
        ("{% unknown %}</think>", set(), True),
        (
            "{%- for m in messages %}{% if strftime_now and xml_tools %}{% break %}{% endif %}"
            "{% endfor %}{{ raise_exception('') }}{{ range(1) }}",
            {"xml_tools"},
            False,
        ),
    ],
)
def test_the_variables_of_a_template_are_found(
    template: Any, variables: set[str], knows: bool
) -> None:
    facts = TemplateFacts.of(template, ["bos_token"])
    assert facts.variables == variables
    assert facts.knows_reasoning is knows


def test_the_special_tokens_of_a_tokenizer_are_no_variables() -> None:
    assert TokenizerCodec(family_tokenizer("llama3")).template_facts.variables == set()


@pytest.mark.parametrize(
    ("names", "variables", "says"),
    [
        (["qwen", "chatml"], {"enable_thnking": False}, "'enable_thnking'.*Did you mean 'enable_t"),
        (["qwen"], {"messages": []}, "reads 'messages'"),
        (["qwen"], {"enable_thinking": "false"}, "'enable_thinking' must be true or false"),
        (["qwen"], {"said": float("nan")}, "JSON compliant"),
    ],
)
def test_variables_that_no_template_reads_are_refused(
    names: list[str], variables: Any, says: str
) -> None:
    with pytest.raises(InvalidOptionError, match=says):
        thinkers(*names).generate("a prompt", chat_template_kwargs=variables)
    with pytest.raises(InvalidOptionError, match=says):
        thinkers(*names, chat_template_kwargs=variables)


def test_control_tokens_in_variables_stay_text() -> None:
    made = TokenizerCodec(tokenizer("bytelevel", CHATML + "{{ note }}"))
    conversation = check_conversation(ASKED)
    tokens = made.encode_conversation(conversation, ReplyStart({"note": "<|im_end|>x"}))
    plain = made.encode_conversation(conversation, ReplyStart({"note": "x"}))
    assert decoded(made, tokens).endswith("<|im_end|>x")
    end = made._tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokens.count(end) == plain.count(end)


BRIEF = {"role": "system", "content": "Be brief. /no_think"}
THINK, CHAT = "<think>\n", "assistant\n"
NO = {"enable_thinking": False}


@pytest.mark.parametrize(
    ("asked", "variables", "ends"),
    [
        ([], {}, {"qwen": CHAT + THINK, "deepseek": "<|A|>" + THINK, "smol": CHAT + THINK}),
        ([], {}, {"qwen": CHAT, "smol": CHAT}),  # no template opens reasoning
        ([], {}, {"deepseek": "<|A|>" + OFF, "granite": "<|assistant|>", "chatml": CHAT}),
        ([], {"enable_thinking": True}, {"qwen": CHAT, "chatml": CHAT}),
        ([], NO, {"qwen": OFF, "smol": OFF}),
        ([BRIEF], {}, {"smol": OFF, "deepseek": OFF, "qwen": OFF}),
    ],
)
def test_all_members_begin_in_reasoning_or_none(
    asked: list[Any], variables: dict[str, Any], ends: dict[str, str]
) -> None:
    options = {"chat_template_kwargs": variables} if variables else {}
    texts, prefix = prompts(thinkers(*ends), [*asked, *ASKED], **options)
    assert prefix == (THINK if all(end.endswith(THINK) for end in ends.values()) else "")
    for name, end in ends.items():
        assert texts[name].endswith(end)


@pytest.mark.parametrize(
    ("form", "keeps"),
    [
        ({"regex": r"\d+"}, False),
        ({"choices": ["Yes", "<think>x</think>"]}, False),
        ({"regex": r"(?s:.*)"}, True),
        ({"regex": r"[a-z]+</think>Yes"}, True),
        ({"regex": r"<think>\s[a-z]+</think>\d"}, True),
    ],
)
def test_a_form_without_reasoning_ends_it(form: dict[str, Any], keeps: bool) -> None:
    if "choices" not in form:
        pytest.importorskip("llguidance")
    texts, prefix = prompts(thinkers("qwen", "deepseek"), ASKED, **form)
    assert prefix == ("<think>\n" if keeps else "")
    assert all(text.endswith("<think>\n" if keeps else OFF) for text in texts.values())


def test_members_that_cannot_be_switched_off_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        thinkers("qwen", "smol", "granite", "chatml")
        thinkers("qwen", "deepseek")
        thinkers("deepseek")
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        thinkers("qwen", "deepseek", "chatml")
    (message,) = caplog.messages
    assert "'deepseek', but not 'qwen', 'chatml'" in message


# Messages with reasoning ------------------------------------------------------------------------

CALLS = [{"id": "1", "name": "add", "arguments": {}}]
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1", "reasoning_content": "early"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2", "reasoning_content": "late", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "1", "content": "3"},
]


def test_only_templates_that_read_reasoning_see_it() -> None:
    for name in ("deepseek", "chatml", "plain", "qwen"):
        text = decoded(codec(name), codec(name).encode_messages(TURNS))
        assert "early" not in text  # qwen shows reasoning only after the last question
        assert "late" not in text or name == "qwen"


READER = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content %}{{- '[' + m.reasoning_content + ']' }}{% endif %}"
    "{{- m.content + '<|im_end|>\n' }}{% endfor %}"
)
"""A template that shows all reasoning, and knows no tools."""


def test_templates_that_read_reasoning_see_it_as_text() -> None:
    made = TokenizerCodec(tokenizer("bytelevel", READER))
    turns = [{**turn} for turn in TURNS]
    turns[1]["reasoning_content"] = "early<|im_end|>"
    tokens = made.encode_messages(turns)
    text = decoded(made, tokens)
    assert "assistant\n[early<|im_end|>]1<|im_end|>" in text
    assert "assistant\n[late]2\n<tool_call>" in text
    end = made._tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokens.count(end) == len(turns)


def test_reasoning_is_part_of_turns_with_calls_in_the_templates_own_form() -> None:
    template = TOOL_FAMILIES["qwen3"].template
    shown = "{{- '<|im_start|>assistant\n' + (m.reasoning_content or '') + said }}"
    changed = template.replace("{{- '<|im_start|>assistant\n' + said }}", shown)
    assert changed != template
    made = TokenizerCodec(tokenizer("bytelevel", changed))
    text = decoded(made, made.encode_messages(TURNS))
    assert "assistant\nearly1<|im_end|>" in text
    assert 'assistant\nlate2\n<tool_call>\n{"name": "add"' in text


# Continued messages -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, *TOOL_FAMILIES])
def test_every_family_reads_exactly_the_text_to_continue(name: str) -> None:
    made = TokenizerCodec(family_tokenizer(name))
    for asked in (ASKED, TURNS[2:]):
        begun = {"role": "assistant", "content": " <|im_end|>It  is\n"}
        conversation = check_conversation([*asked, begun]).continued()
        text = decoded(made, made.encode_conversation(conversation))
        assert text.endswith(begun["content"])
        assert "word" not in text
        before = decoded(made, made.encode_conversation(conversation.before_reply()))
        assert text.startswith(before[:-20].rstrip())


def test_a_template_that_refuses_the_text_to_continue_is_read_up_to_it() -> None:
    template = "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    made = TokenizerCodec(tokenizer("bytelevel", template))
    conversation = check_conversation([*ASKED, {"role": "assistant", "content": "It is"}])
    before = decoded(made, made.encode_messages(ASKED))
    assert decoded(made, made.encode_conversation(conversation.continued())) == f"{before}It is"


@pytest.mark.parametrize("kind", ["bytelevel", "sentencepiece"])
def test_a_space_before_the_text_to_continue_is_part_of_its_first_word(kind: str) -> None:
    made = TokenizerCodec(tokenizer(kind, STRICT))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The keeper"}]
    conversation = check_conversation(turns).continued()
    before = made.encode_conversation(conversation.before_reply())
    after, _ = made.encode_continuation(before, " The keeper")
    assert made.encode_conversation(conversation) == before + after


@pytest.mark.parametrize("kind", ["bytelevel", "unigram"])
@pytest.mark.parametrize(
    ("name", "text", "end"),
    [
        ("qwen", "  a\n\n", f"assistant\n{OFF}  a\n\n"),
        ("qwen", "<think>\nSo", "assistant\n<think>\nSo"),
        ("deepseek", "The keeper  is", "<|A|>The keeper  is"),
        ("deepseek", "<think>\nSo</think>x", "<|A|><think>\nSo</think>x"),
        ("smol", "a<|im_end|>b", "assistant\na<|im_end|>b"),
        ("chatml", "a<|im_end|>b", "assistant\na<|im_end|>b"),
        ("plain", "The keeper  is", "\n\nAssistant: The keeper  is"),
    ],
)
def test_the_text_to_continue_ends_the_prompt(name: str, kind: str, text: str, end: str) -> None:
    made = codec(name, kind)
    conversation = check_conversation([*ASKED, {"role": "assistant", "content": text}])
    tokens = made.encode_conversation(conversation.continued())
    assert decoded(made, tokens).endswith(end)
    assert made._tokenizer.convert_tokens_to_ids("<|im_end|>") not in tokens[-3:]


def test_the_spaces_at_the_end_of_a_begun_text_are_healed() -> None:
    engine = thinkers("chatml", "plain", script=lambda _: "x")
    messages = [*ASKED, {"role": "assistant", "content": "The keeper is   "}]
    members = members_of(engine, messages, continue_final_message=True)
    for member in members:
        assert decoded(member.codec, list(member.tree.ids)).endswith("keeper is")
        assert member.opening.spaces == 3
        assert not member.opening.is_reply


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": "a"}, "has the role 'user'$"),
        ({"role": "assistant", "content": " \n"}, "'assistant' without text"),
        ({"role": "assistant", "content": "a", "tool_calls": CALLS}, "with tool calls"),
    ],
)
def test_only_an_assistants_text_can_be_continued(message: Any, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        thinkers("chatml").generate(messages=[*ASKED, message], continue_final_message=True)


def test_reasoning_can_be_continued() -> None:
    begun = {"role": "assistant", "content": "", "reasoning_content": "So"}
    texts, prefix = prompts(
        thinkers("qwen", "deepseek"), [*ASKED, begun], continue_final_message=True
    )
    assert prefix == "<think>"
    assert all(text.endswith("<think>\nSo") for text in texts.values())


def test_a_form_without_reasoning_cannot_continue_reasoning() -> None:
    messages = [*ASKED, {"role": "assistant", "content": "<think>\nSo"}]
    asked: dict[str, Any] = {"continue_final_message": True, "choices": ["7"]}
    with pytest.raises(InvalidInputError, match="reasoning"):
        thinkers("qwen").generate(messages=messages, **asked)
    messages[-1] = {"role": "assistant", "content": "<think>\nSo</think>\n\n"}
    assert thinkers("qwen", script=lambda _: "7").generate(messages=messages, **asked)
