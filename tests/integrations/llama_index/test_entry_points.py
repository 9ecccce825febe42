"""Eight entry points, one decode: the same text, counted once, whatever is asked."""

from __future__ import annotations

import base64
import io
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    ChatMessage,
    CitableBlock,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.callbacks import (
    CallbackManager,
    CBEventType,
    LlamaDebugHandler,
    TokenCountingHandler,
)
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import AdaFuseConfig, AdaFuseEngine, InvalidInputError, InvalidOptionError
from adafuse_llm.config import CONSTRAINTS
from tests.support.llama_calls import PATHS, ask, prompt_of, prompts_read, recorded
from tests.support.models import CHATML, STRICT
from tests.support.scripted import scripted, scripted_engine

READS: list[str] = []
"""Prompts that members read."""

REPLIES = {
    "Where": "Orrin lies north of Vell, by the sea.\n\nA ferry goes there.",
    "Chinese": "你好，世界！🐙 こんにちは\N{ZERO WIDTH JOINER}👩‍🚀 ok",
    "Nothing": "",
    "Dutch": "Nee, dank u.",
}


def script(prompt: str) -> str:
    READS.append(prompt)
    return next((reply for key, reply in reversed(REPLIES.items()) if key in prompt), "What?")


@pytest.fixture(scope="module")
def engine():
    with scripted_engine(script) as engine:
        yield engine


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str | None]] = {
    "plain": ("Where is it?", {}, {}, REPLIES["Where"]),
    "stop": ("Where is it?", {}, {"stop": [" by the", "\n"]}, "Orrin lies north of Vell,"),
    "stop of the LLM": ("Where is it?", {"stop": " of"}, {}, "Orrin lies north"),
    "system prompt": ("Where?", {"system_prompt": "Speak Dutch."}, {}, REPLIES["Dutch"]),
    "overrides": ("Where is it?", {"max_words": 3}, {"max_words": 1, "max_tokens": 4}, None),
    "early end": ("Nothing at all?", {}, {}, ""),
    "any script": ("Chinese?", {}, {}, REPLIES["Chinese"]),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("path", "as_chat"), [*((path, True) for path in PATHS), *((path, False) for path in PATHS[:4])]
)
async def test_every_path_returns_the_same_text_and_counts_it_once(engine, path, as_chat, case):
    question, fields, options, expected = CASES[case]
    fields = fields if as_chat else {**fields, "complete_as_chat": False}
    counter, debug = TokenCountingHandler(), LlamaDebugHandler(print_trace_on_end=False)
    llm = AdaFuseLLM(engine=engine, callback_manager=CallbackManager([counter, debug]), **fields)
    asked = question if as_chat else prompt_of(path, question)
    with recorded() as record:
        said = await ask(llm, path, asked, **options)

    stop = options.get("stop") or fields.get("stop") or ()
    set_ = {"stop": stop, "max_words": options.get("max_words", fields.get("max_words", 3))}
    set_["max_new_tokens"] = options.get("max_tokens", 256)
    if as_chat:
        system = [{"role": "system", "content": text} for text in (fields.get("system_prompt"),)]
        turns = [
            *(system if fields.get("system_prompt") else []),
            {"role": "user", "content": asked},
        ]
        own = engine.generate(messages=turns, **set_)
    else:
        before = f"{fields['system_prompt']}\n\n" if "system_prompt" in fields else ""
        own = engine.generate(before + asked, **set_)
    assert said.text == own.text
    assert expected is None or said.text == expected
    assert "".join(delta or "" for delta in said.deltas) == said.text
    assert all(after.startswith(text) for text, after in itertools.pairwise(said.texts))
    assert len(said.texts) == (len(own.rounds) if "stream" in path else 1)

    usage = said.raw.usage
    assert usage is not None
    assert usage.members is not None
    assert usage.members.prompt_tokens == own.usage.prompt_tokens
    assert usage.members.completion_tokens == own.usage.completion_tokens
    assert usage.prompt_tokens == own.usage.prompt_tokens["ink"]
    assert [event.prompt_token_count for event in counter.llm_token_counts] == [usage.prompt_tokens]
    if usage.completion_tokens:  # core takes zero for unknown
        assert counter.completion_llm_token_count == usage.completion_tokens
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 1
    kind = "LLMChat" if "chat" in path else "LLMCompletion"
    for event in ("StartEvent", "EndEvent"):
        assert len(record.named(kind + event)) == 1
    other = "LLMCompletion" if "chat" in path else "LLMChat"
    assert not record.named(other + "StartEvent")


@pytest.mark.quick
@pytest.mark.parametrize("path", PATHS)
async def test_a_chunk_tells_its_round_and_the_last_one_the_whole(engine, path):
    said = await ask(AdaFuseLLM(engine=engine), path, prompt_of(path, "Where is it?"))
    rounds = [each.index for raw in said.raws for each in raw.rounds]
    assert said.raw.summary is not None
    assert rounds == list(range(said.raw.summary.rounds))
    for raw in said.raws[:-1]:
        assert (len(raw.rounds), raw.usage, raw.finish_reason, raw.summary) == (1, None, None, None)
    assert said.raw.finish_reason == "stop"
    assert said.raw.model_validate_json(said.raw.model_dump_json()) == said.raw
    with pytest.raises(ValueError, match="frozen"):
        said.raw.finish_reason = "length"


# What members read ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_prompt_functions_mean_the_same_on_every_path(path):
    seen: list[str] = []
    engine = AdaFuseEngine([scripted(lambda text: seen.append(text) or "Yes.", name="only")])
    llm = AdaFuseLLM(
        engine=engine,
        system_prompt="SYSTEM",
        completion_to_prompt=lambda prompt: f"C({prompt})",
        messages_to_prompt=lambda messages: f"M({'|'.join(str(m.content) for m in messages)})",
        query_wrapper_prompt="Q({query_str})",
    )
    await ask(llm, path, "ask")
    expected = "M(SYSTEM|Q(ask))" if "chat" in path else "Q(SYSTEM\n\nC(ask))"
    assert expected in seen[-1]
    seen.clear()
    if "chat" not in path:
        await ask(llm, path, "ask", formatted=True)
        assert {text.split("\n")[0] for text in seen} == {"ask"}


def test_chat_gives_every_member_its_own_template_with_one_beginning(engine):
    llm = AdaFuseLLM(engine=engine, system_prompt="Be brief.")
    READS.clear()
    llm.chat(
        [
            ChatMessage(role=MessageRole.SYSTEM, content="You know the coast."),
            ChatMessage(role=MessageRole.USER, content="Where is Orrin?"),
            ChatMessage(role=MessageRole.USER, content="And Vell?"),
            ChatMessage(
                role=MessageRole.CHATBOT,
                blocks=[ThinkingBlock(content="Hm."), *ChatMessage("North.").blocks],
            ),
            ChatMessage(role=MessageRole.ASSISTANT, content=None),
            ChatMessage(role=MessageRole.USER, content="Which one?"),
        ]
    )
    ink, quill = (
        {text for text in READS if ("<|im_start|>" in text) == own} for own in (True, False)
    )
    for text in (*ink, *quill):
        assert text.count("Be brief.") == text.count("You know the coast.") == 1
        assert text.index("Be brief.") < text.index("coast") < text.index("And Vell?")
        assert "Hm." not in text
        assert "None" not in text
    assert len(ink) == len(quill) == 1
    assert [text.count("<s>") for text in quill] == [1]


@pytest.mark.quick
def test_text_in_documents_is_read(tmp_path):
    (tmp_path / "ferry.md").write_text("The ferry costs 3 crowns, dökk.", encoding="utf-8")
    page = "data:text/html;base64," + base64.b64encode(b"<p>Vell is south.</p>").decode()
    documents = [
        CitableBlock(
            title="Orrin",
            source="orrin.md",
            content=[TextBlock(text="Orrin lies north."), DocumentBlock(data=b"It has a mill.")],
        ),
        DocumentBlock(path=str(tmp_path / "ferry.md"), title="Ferry"),
        DocumentBlock(data=io.BytesIO(b'{"open": true}'), document_mimetype="application/json"),
        DocumentBlock(url=page),
    ]
    fields: dict[str, Any] = {"system_prompt": "SYSTEM", "query_wrapper_prompt": "<{query_str}>"}
    with reading(CHATML) as (engine, texts):
        llm = AdaFuseLLM(engine=engine, **fields)
        system = ChatMessage(role="system", blocks=[DocumentBlock(data=b"Be brief, please.")])
        llm.chat([system, ChatMessage(blocks=[*documents, TextBlock(text="Where?")])])
    (prompt,) = texts
    assert "SYSTEM\n\nBe brief, please." in prompt
    assert (
        "user\nTitle: Orrin\nSource: orrin.md\nOrrin lies north.\nIt has a mill.\n"
        'Title: Ferry\nThe ferry costs 3 crowns, dökk.\n{"open": true}\n<p>Vell is south.</p>\n'
        "<Where?>"
    ) in prompt


@pytest.mark.quick
def test_documents_without_text_are_refused(engine, tmp_path):
    (tmp_path / "scan.txt").write_bytes(b"\x89\x00\xff\xfe")
    for block in (
        DocumentBlock(data=b"%PDF-1.4\n%\xe2\xe3\xcf"),
        DocumentBlock(path=str(tmp_path / "scan.txt")),
        DocumentBlock(url="https://example.com/a.txt"),
        DocumentBlock(),
    ):
        with pytest.raises(InvalidInputError, match=r"message 1 contains DocumentBlock.*UTF-8"):
            AdaFuseLLM(engine=engine).chat([ChatMessage("?"), ChatMessage(blocks=[block])])


@pytest.mark.quick
def test_what_is_not_text_is_refused(engine):
    llm = AdaFuseLLM(engine=engine)
    image = ImageBlock(image=b"AAAA")
    picture = ChatMessage(blocks=[image])
    found = CitableBlock(title="a", source="b", content=[image])
    for message in (picture, ChatMessage(blocks=[found])):
        with pytest.raises(InvalidInputError, match="message 0 contains ImageBlock"):
            llm.chat([message])
    with pytest.raises(InvalidInputError, match="message 0 contains ImageBlock"):
        AdaFuseLLM(engine=engine, query_wrapper_prompt="{query_str}!").chat([picture])
    with pytest.raises(InvalidInputError, match="empty: pass at least one user"):
        llm.chat([])


@pytest.mark.quick
def test_members_read_the_text_of_tools_and_other_llms_beside_images(caplog):
    picture, pdf = ImageBlock(image=b"AAAA"), DocumentBlock(data=b"%PDF-1.4\n%\xe2\xe3\xcf")
    found = CitableBlock(title="Map", source="a.md", content=[TextBlock(text="North."), picture])
    call = ToolCallBlock(tool_call_id="1", tool_name="look", tool_kwargs={})
    again = ToolCallBlock(tool_call_id="2", tool_name="look", tool_kwargs={})
    history = [
        ChatMessage("Where?"),
        ChatMessage(role="assistant", blocks=[picture, TextBlock(text="I look."), call, again]),
        ChatMessage(
            role="tool",
            blocks=[TextBlock(text="A map:"), picture, found, pdf],
            additional_kwargs={"tool_call_id": "1"},
        ),
        ChatMessage(role="tool", blocks=[picture], additional_kwargs={"tool_call_id": "2"}),
    ]
    with reading(CHATML) as (engine, texts):
        llm = AdaFuseLLM(engine=engine)
        llm.chat(history)
        llm.chat([*history, ChatMessage("And now?")])
    for prompt in texts:
        assert r"A map:\nTitle: Map\nSource: a.md\nNorth." in prompt
        assert "I look." in prompt
        assert "(ImageBlock left out)" in prompt
    (warning,) = caplog.messages
    assert "DocumentBlock, ImageBlock" in warning


@contextmanager
def reading(*templates: str | None) -> Iterator[tuple[AdaFuseEngine, set[str]]]:
    """An engine with one member per template, and the prompts that its members have read."""
    texts: set[str] = set()
    members = [
        scripted(lambda prompt: "Yes.", name=f"member{n}", template=template)
        for n, template in enumerate(templates)
    ]
    with AdaFuseEngine(members) as engine, prompts_read(engine) as prompts:
        yield engine, texts
        for member in members:
            texts |= {member.codec.decode_continuation((), ids) for ids in prompts[member.name]}


async def prompts_of_call(
    path: str, *templates: str | None, options: Any = None, **fields: Any
) -> set[str]:
    with reading(*templates) as (engine, texts):
        await ask(AdaFuseLLM(engine=engine, **fields), path, "Is it blue?", **(options or {}))
    return texts


@pytest.mark.parametrize("path", PATHS[:4])
async def test_a_completion_is_a_chat_with_one_user_message(path):
    templates = (CHATML, STRICT)
    fields: dict[str, Any] = {"system_prompt": "SYSTEM", "query_wrapper_prompt": "<{query_str}>"}
    as_chat = await prompts_of_call(path.replace("complete", "chat"), *templates, **fields)
    assert all("SYSTEM" in text and "<Is it blue?>" in text for text in as_chat)
    assert len(as_chat) == 2
    assert await prompts_of_call(path, *templates, **fields) == as_chat
    assert await prompts_of_call(path, *templates, complete_as_chat=True, **fields) == as_chat

    continued = await prompts_of_call(path, *templates, complete_as_chat=False, **fields)
    assert continued == {"<SYSTEM\n\nIs it blue?>"}
    formatted = await prompts_of_call(path, *templates, options={"formatted": True}, **fields)
    assert formatted == {"Is it blue?"}
    own: dict[str, Any] = {"completion_to_prompt": lambda prompt: f"Q: {prompt}"}
    assert await prompts_of_call(path, *templates, **own) == {"Q: Is it blue?"}
    both = await prompts_of_call(path, *templates, complete_as_chat=True, **own)
    assert all("Q: Is it blue?" in text for text in both)
    assert len(both) == 2

    plain = await prompts_of_call(path, CHATML, None, options={"use": ["member1"]})
    assert plain == {"Is it blue?"}
    (only,) = await prompts_of_call(path, CHATML, None, options={"use": ["member0"]})
    assert only.startswith("<|im_start|>user\nIs it blue?")
    mixed = await prompts_of_call(path, CHATML, None)
    assert mixed == {only, "User: Is it blue?\n\nAssistant:"}
    continued = await prompts_of_call(path, CHATML, None, complete_as_chat=False)
    assert continued == {"Is it blue?"}


# Tool calls of other LLMs -----------------------------------------------------------------------

ADD: dict[str, Any] = {
    "id": "call_1",
    "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
}
OPENAI = SimpleNamespace(id="call_1", function=SimpleNamespace(**ADD["function"]))
BLOCKS = [
    ToolCallBlock(tool_call_id="call_1", tool_name="add", tool_kwargs='{"a": 1, "b": 2}'),
    ToolCallBlock(tool_call_id="call_1", tool_name="add", tool_kwargs={"a": 1, "b": 2}),
]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("blocks", "extras"),
    [
        ([BLOCKS[0]], {}),
        ([BLOCKS[1]], {}),
        ([], {"tool_calls": [ADD]}),
        ([], {"tool_calls": [OPENAI]}),
        ([BLOCKS[0]], {"tool_calls": [OPENAI]}),
    ],
)
def test_tool_calls_of_other_llms_are_read(blocks, extras):
    with reading(CHATML) as (engine, texts):
        AdaFuseLLM(engine=engine).chat(
            [
                ChatMessage("What is 1 + 2?"),
                ChatMessage(role="assistant", blocks=blocks, additional_kwargs=extras),
                ChatMessage("3", role="tool", additional_kwargs={"tool_call_id": "call_1"}),
            ]
        )
    (prompt,) = texts
    assert prompt.count('{"name": "add", "arguments": {"a": 1, "b": 2}}') == 1
    assert prompt.count('{"name": "add", "content": "3"}') == 1


@pytest.mark.quick
def test_a_result_without_its_call_is_text_of_the_user():
    result = ChatMessage("It is 3.", role="tool", additional_kwargs={"tool_call_id": "call_0"})
    with reading(CHATML) as (engine, texts):
        AdaFuseLLM(engine=engine).chat([result, ChatMessage("Is that right?")])
    (prompt,) = texts
    assert "<|im_start|>user\nIt is 3." in prompt
    assert "tool_response" not in prompt


@pytest.mark.quick
def test_a_call_without_arguments_is_read_and_a_malformed_one_is_text():
    with reading(CHATML) as (engine, texts):
        llm = AdaFuseLLM(engine=engine)
        block = ToolCallBlock(tool_call_id="call_1", tool_name="now", tool_kwargs="")
        llm.chat([ChatMessage("When?"), ChatMessage(role="assistant", blocks=[block])])
        for wrong in ('{"a": 1', "[1]"):
            block = ToolCallBlock(tool_call_id="call_1", tool_name="add", tool_kwargs=wrong)
            llm.chat([ChatMessage(role="assistant", blocks=[block]), ChatMessage("?")])
    for written in (
        '"now", "arguments": {}}',
        '"add", "arguments": {"a": 1}',
        '"add", "arguments": [1]}',
    ):
        assert any(f'<tool_call>\n{{"name": {written}\n</tool_call>' in text for text in texts)


# Options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_no_option_is_ignored(engine, path):
    llm = AdaFuseLLM(engine=engine)
    refusals: list[tuple[dict[str, Any], str, type[Exception]]] = [
        ({"max_new_token": 3}, "max_new_token", InvalidOptionError),
        ({"margin_threshold": 3}, "margin_threshold", InvalidOptionError),
        ({"use": ["pen"]}, "there is no member 'pen'", InvalidOptionError),
        ({"members": ["ink"]}, r"pass use=\[...\]", InvalidOptionError),
    ]
    for options, message, cause in refusals:
        with pytest.raises(cause, match=message):
            await ask(llm, path, "Where?", **options)
    said = await ask(llm, path, prompt_of(path, "Where is it?"), use=["ink"])
    assert said.raw.usage is not None
    assert set(said.raw.usage.members.prompt_tokens) == {"ink"}


@pytest.mark.quick
def test_every_option_is_a_field(engine):
    assert {*AdaFuseConfig.model_fields} <= {*AdaFuseLLM.model_fields}
    said: dict[str, Any] = {"use": ("quill",), "weights": {"quill": 2.0}, "logit_bias": {"x": -1.0}}
    with recorded() as record:
        AdaFuseLLM(engine=engine, **said).chat([ChatMessage("Where?")])
    (start,) = record.named("AdaFuseGenerationStartEvent")
    assert start.options == AdaFuseConfig(**said).model_dump(mode="json")
    assert start.members == ("quill",)


@pytest.mark.parametrize("path", PATHS)
async def test_template_variables_and_a_begun_reply_reach_the_members(path):
    template = "{% if loud %}LOUD {% endif %}" + CHATML
    loud: dict[str, Any] = {"chat_template_kwargs": {"loud": True}}
    (prompt,) = await prompts_of_call(path, template, options=loud)
    assert prompt == ("LOUD <|im_start|>user\nIs it blue?<|im_end|>\n<|im_start|>assistant\n")
    assert await prompts_of_call(path, template, **loud) == {prompt}
    if "chat" in path:
        with reading(CHATML) as (engine, texts):
            begun = [ChatMessage("Is it blue?"), ChatMessage("It is", role="assistant")]
            await ask(AdaFuseLLM(engine=engine), path, begun, continue_final_message=True)
        (prompt,) = texts
        assert prompt.endswith("<|im_start|>assistant\nIt is")


FORMS: dict[str, Any] = {
    "json_schema": ({"type": "array", "items": {"type": "boolean"}, "minItems": 1}, r"\[.*\]"),
    "regex": ("(yes|no)!", "(yes|no)!"),
    "grammar": ('start: "is it " ("sea" | "land")', "is it (sea|land)"),
    "choices": (["sea", "land"], "sea|land"),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
async def test_a_reply_has_the_form_that_an_option_gives_it(engine, path, form):
    assert {*FORMS} == {*CONSTRAINTS}
    value, pattern = FORMS[form]
    options: dict[str, Any] = {form: value}
    shaped = AdaFuseLLM(engine=engine, max_new_tokens=24, **options)
    said = await ask(shaped, path, "Where is it?")
    assert re.fullmatch(pattern, said.text)
    free = AdaFuseLLM(engine=engine, max_new_tokens=24)
    assert (await ask(free, path, "Where is it?", **options)).text == said.text
    replaced = await ask(shaped, path, "Where is it?", **{form: None, "choices": ["hill"]})
    assert replaced.text == "hill"
    with pytest.raises(InvalidInputError, match="only one of"):
        await ask(free, path, "Where?", regex="a", choices=["b"])


# What is not a prompt and not a conversation ------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("path", PATHS)
async def test_a_prompt_or_a_conversation_without_text_is_refused(path):
    empty: Any = [ChatMessage(content="")] if "chat" in path else " "
    llm = AdaFuseLLM(engine=scripted_engine(lambda prompt: "Yes."))
    with pytest.raises(InvalidInputError, match=r"empty|no text"):
        await ask(llm, path, empty)


@pytest.mark.quick
def test_the_repr_of_a_response_is_short():
    text = " ".join(f"word{number}" for number in range(60))
    with scripted_engine(lambda prompt: text, max_new_tokens=500) as engine:
        raw = AdaFuseLLM(engine=engine).chat([ChatMessage(content="Go on")]).raw
    assert raw is not None
    assert len(repr(raw)) < 200 < len(raw.model_dump_json())
