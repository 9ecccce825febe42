"""All eight entry points return the same text, and count it once; what members read."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    ChatMessage,
    DocumentBlock,
    ImageBlock,
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
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.adafuse import AdaFuseLLM
from llama_index.llms.adafuse._messages import to_turn

from adafuse_llm import AdaFuseEngine
from tests.support.llama_calls import FORMS, PATHS, ask, recorded
from tests.support.models import CHATML, STRICT
from tests.support.scripted import scripted, scripted_engine
from tests.support.thinkers import thinkers

REPLIES = {
    "Where": "Orrin lies north of Vell, by the sea.\n\nA ferry goes there.",
    "Nothing": "",
    "Dutch": "Nee, dank u. 🐙",
}


@pytest.fixture(scope="module")
def engine():
    def script(prompt: str) -> str:
        return next((text for key, text in reversed(REPLIES.items()) if key in prompt), "What?")

    with scripted_engine(script) as engine:
        yield engine


CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("Where is it?", {"stop": "?"}, {"stop": [" by the"]}, "Orrin lies north of Vell,"),
    ("Nothing at all?", {}, {}, ""),
    ("Where?", {"system_prompt": "Speak Dutch."}, {"max_words": 1}, REPLIES["Dutch"]),
]


@pytest.mark.quick
@pytest.mark.parametrize("path", PATHS)
async def test_every_path_returns_the_engines_text_and_counts_it_once(engine, path):
    for question, fields, options, expected in CASES:
        counter, debug = TokenCountingHandler(), LlamaDebugHandler(print_trace_on_end=False)
        llm = AdaFuseLLM(
            engine=engine, callback_manager=CallbackManager([counter, debug]), **fields
        )
        with recorded() as record:
            said: Any = await ask(llm, path, question, **options)
        system = fields.get("system_prompt")
        turns = [{"role": "system", "content": system}] if system and "chat" not in path else []
        own = engine.generate(messages=[*turns, {"role": "user", "content": question}], **options)
        assert said.text == own.text == (expected if turns or not system else REPLIES["Where"])
        assert "".join(delta or "" for delta in said.deltas) == said.text
        assert len(said.texts) == (len(own.rounds) if "stream" in path else 1)

        *parts, last = said.raws
        assert [each.index for raw in said.raws for each in raw.rounds] == [*range(len(own.rounds))]
        assert all(len(raw.rounds) == 1 and raw.usage is raw.finish_reason is None for raw in parts)
        assert last.finish_reason == own.finish_reason
        assert last.model_validate_json(last.model_dump_json()) == last
        assert len(repr(last)) < 200 < len(last.model_dump_json())
        assert last.usage.members.completion_tokens == own.usage.completion_tokens
        assert last.usage.prompt_tokens == max(own.usage.prompt_tokens.values())
        counts = [event.prompt_token_count for event in counter.llm_token_counts]
        assert counts == [last.usage.prompt_tokens]
        assert len(debug.get_event_pairs(CBEventType.LLM)) == 1
        kinds = ("Chat", "Completion") if "chat" in path else ("Completion", "Chat")
        starts = [record.named(f"LLM{kind}StartEvent") for kind in kinds]
        assert [len(each) for each in starts] == [1, 0]


# What members read ------------------------------------------------------------------------------


@contextmanager
def reading(*templates: str | None) -> Iterator[tuple[AdaFuseEngine, set[str]]]:
    """An engine with one member per template, and the prompts that its members have read."""
    texts: set[str] = set()
    trees: list[Any] = []

    def noting(member: Any, evaluate: Any) -> Any:
        def noted(queries: Any) -> Any:
            for query in queries:
                if not any(query.tree is tree for tree in trees):
                    trees.append(query.tree)
                    texts.add(member.codec.decode_continuation((), query.tree.ids))
            return evaluate(queries)

        return noted

    members: list[Any] = [
        scripted(lambda prompt: "Yes.", name=f"member{n}", template=template)
        for n, template in enumerate(templates)
    ]
    for member in members:
        member.evaluate = noting(member, member.evaluate)
    with AdaFuseEngine(members) as engine:
        yield engine, texts


def prompt_of_chat(*messages: Any, **fields: Any) -> str:
    with reading(CHATML) as (engine, texts):
        AdaFuseLLM(engine=engine, **fields).chat([*messages])
    (prompt,) = texts
    return prompt


@pytest.mark.parametrize("path", FORMS)
async def test_prompt_functions_mean_the_same_on_every_path(path):
    with reading(CHATML) as (engine, texts):
        llm = AdaFuseLLM(
            engine=engine,
            system_prompt="SYSTEM",
            completion_to_prompt=lambda prompt: f"C({prompt})",
            messages_to_prompt=lambda messages: f"M({'|'.join(str(m.content) for m in messages)})",
            query_wrapper_prompt="Q({query_str})",
        )
        await ask(llm, path, "ask")
        if "chat" not in path:
            await ask(llm, path, "as it is", formatted=True)
    chats = "chat" in path
    assert texts == ({"M(ask)"} if chats else {"Q(SYSTEM\n\nC(ask))", "as it is"})


def test_a_chat_gives_every_member_its_own_template():
    messages = [
        ChatMessage(role="system", content="You know the coast."),
        ChatMessage("Where is Orrin?"),
        ChatMessage("North.", role="chatbot"),
        ChatMessage(role="assistant", content=None),
        ChatMessage("Which one?"),
    ]
    with reading(CHATML, STRICT) as (engine, texts):
        AdaFuseLLM(engine=engine).chat(messages)
    assert len(texts) == 2
    for text in texts:
        assert text.index("You know the coast.") < text.index("North.")
        assert "None" not in text
    with reading(CHATML) as (engine, texts):
        AdaFuseLLM(engine=engine, system_prompt="Be brief.").predict(PromptTemplate("Is it?"))
    assert texts.pop().count("Be brief.") == 1


async def test_a_completion_is_a_chat_with_one_user_message():
    async def read(*templates: Any, options: Any = None, **fields: Any) -> set[str]:
        with reading(*templates) as (engine, texts):
            await ask(AdaFuseLLM(engine=engine, **fields), "complete", "Is it?", **(options or {}))
        return texts

    fields: dict[str, Any] = {"system_prompt": "SYSTEM", "query_wrapper_prompt": "<{query_str}>"}
    as_chat = await read(CHATML, STRICT, **fields)
    assert len(as_chat) == 2
    assert all("SYSTEM" in text and "Is it?" in text for text in as_chat)
    same: dict[str, Any] = {"completion_to_prompt": lambda prompt: prompt}
    assert await read(CHATML, **same, **fields) == {"<SYSTEM\n\nIs it?>"}
    assert await read(CHATML, options={"formatted": True}, **fields) == {"Is it?"}
    own: dict[str, Any] = {"completion_to_prompt": lambda prompt: f"Q: {prompt}"}
    assert await read(CHATML, **own) == {"Q: Is it?"}
    assert await read(CHATML, None, options={"use": ["member1"]}) == {"Is it?"}
    assert "User: Is it?\n\nAssistant:" in await read(CHATML, None)


def test_what_is_not_text_is_left_out_with_a_note(caplog):
    picture, document = ImageBlock(image=b"AAAA"), DocumentBlock(data=b"North.")
    calls = [ToolCallBlock(tool_call_id=n, tool_name="look", tool_kwargs={}) for n in "12"]
    history = [
        ChatMessage(blocks=[TextBlock(text="Where?"), picture]),
        ChatMessage(role="assistant", blocks=[picture, TextBlock(text="I look."), *calls]),
        ChatMessage(
            role="tool",
            blocks=[TextBlock(text="North."), document],
            additional_kwargs={"tool_call_id": "1"},
        ),
        ChatMessage(role="tool", blocks=[picture], additional_kwargs={"tool_call_id": "2"}),
    ]
    prompt = prompt_of_chat(*history)
    for text in (
        "Where?[ImageBlock, not shown]",
        "North.",
        "I look.",
        '"[ImageBlock, not shown]',
    ):
        assert text in prompt
    (warning,) = caplog.messages
    assert "DocumentBlock, ImageBlock" in warning


ADD: dict[str, Any] = {"id": "call_1", "function": {"name": "add", "arguments": '{"a": 1}'}}
BLOCK = ToolCallBlock(tool_call_id="call_1", tool_name="add", tool_kwargs={"a": 1})
OBJECT = SimpleNamespace(model_dump=lambda: ADD)


@pytest.mark.parametrize(
    ("blocks", "extras"),
    [([], [ADD]), ([], [OBJECT]), ([BLOCK], [OBJECT])],
)
def test_tool_calls_of_other_llms_are_read(blocks, extras):
    extras = {"tool_calls": extras}
    turn = to_turn(ChatMessage(role="assistant", blocks=blocks, additional_kwargs=extras))
    by_block = {"id": "call_1", "name": "add", "arguments": {"a": 1}}
    assert turn["tool_calls"] == [by_block if blocks else ADD]


# Reasoning --------------------------------------------------------------------------------------


def test_reasoning_of_histories_is_kept() -> None:
    blocks = [ThinkingBlock(content="so"), TextBlock(text="North.")]
    for answer in (
        ChatMessage(role="assistant", blocks=blocks),
        ChatMessage("North.", role="assistant", additional_kwargs={"reasoning_content": "so"}),
    ):
        assert to_turn(answer)["reasoning"] == "so"


async def test_reasoning_that_the_template_opens_is_not_text():
    engine = thinkers("deepseek", "deepseek-2", script=lambda _: "secret</think>Paris.")
    for path in FORMS:
        said = await ask(AdaFuseLLM(engine=engine), path, "The capital?")
        assert said.text == "".join(delta or "" for delta in said.deltas) == "Paris."
