"""Options that users of other LLMs know: sampling, log-probabilities, several responses."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, LogProb
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.adafuse import AdaFuseLLM, AdaFuseRaw
from pydantic import BaseModel

from adafuse_llm import AdaFuseEngine, InvalidOptionError
from adafuse_llm.adapters.logprobs import openai_logprobs
from adafuse_llm.backends import FakeBackend
from tests.support.llama_calls import PATHS, ask, recorded
from tests.support.scripted import scripted_engine

WORDS = {" red": 0.4, " green": 0.3, " blue": 0.3}
STREAMS = [path for path in PATHS if "stream" in path]
DRAWN: dict[str, Any] = {"temperature": 1, "max_new_tokens": 12}


def colours(share: float) -> Any:
    """A rule that writes up to eight colours. It tells `share` of red from the others."""

    def rule(text: str) -> dict[str, float]:
        count = sum(text.count(word) for word in WORDS)
        if count >= 8:
            return {"<end>": 0.99, " red": 0.01}
        rest = {word: (1 - share) * p / 0.6 for word, p in WORDS.items() if word != " red"}
        return {" red": share, **rest}

    return rule


@pytest.fixture(scope="module")
def engine():
    with AdaFuseEngine(
        [FakeBackend("oak", colours(0.4)), FakeBackend("elm", colours(0.5))]
    ) as engine:
        yield engine


def asked(path: str) -> Any:
    return [ChatMessage("Paint!")] if "chat" in path else "Paint!"


def create(**options: Any) -> Any:
    return AdaFuseLLM(**options)


# Sampling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_a_seed_gives_the_engines_drawn_text_again(engine, path):
    for_all = create(engine=engine, seed=5, top_p=0.8, **DRAWN)
    said = await ask(for_all, path, asked(path))
    question: dict[str, Any] = {"prompt": "Paint!"}
    if "chat" in path:
        question = {"messages": [{"role": "user", "content": "Paint!"}]}
    own = engine.generate(**question, seed=5, top_p=0.8, **DRAWN)
    assert said.text == own.text
    assert said.raw.seed == own.seed == 5
    assert [raw.seed for raw in said.raws[:-1]] == [None] * (len(said.raws) - 1)
    for_one = await ask(create(engine=engine), path, asked(path), seed=5, top_p=0.8, **DRAWN)
    assert for_one.text == said.text

    free = create(engine=engine, **DRAWN)
    texts = {(await ask(free, path, asked(path))).text for _ in range(8)}
    assert len(texts) > 1
    again = await ask(free, path, asked(path))
    assert (await ask(free, path, asked(path), seed=again.raw.seed)).text == again.text
    fixed = await ask(free, path, asked(path), temperature=0)
    assert fixed.text.split() == ["red"] * 8
    assert fixed.raw.seed is None
    assert (await ask(free, path, asked(path), top_k=1)).text == fixed.text


@pytest.mark.parametrize("path", [path for path in PATHS if path not in STREAMS])
async def test_n_responses_are_one_response_and_its_alternatives(engine, path):
    counter = TokenCountingHandler()
    llm = create(engine=engine, n=4, callback_manager=CallbackManager([counter]), **DRAWN)
    with recorded() as record:
        said = await ask(llm, path, asked(path), seed=3)
    raw = said.raw
    alone = create(engine=engine, **DRAWN)
    assert len(raw.alternatives) == 3
    for text, seed in ((said.text, raw.seed), *((a.text, a.seed) for a in raw.alternatives)):
        assert (await ask(alone, path, asked(path), seed=seed)).text == text
    assert AdaFuseRaw.model_validate_json(raw.model_dump_json()) == raw
    (end,) = record.named("AdaFuseGenerationEndEvent")
    assert (end.text, end.seed) == (said.text, raw.seed)
    rounds = [event.text for event in record.named("AdaFuseRoundEvent")]
    assert rounds == [each.text for each in raw.rounds]
    assert len(record.closed("AdaFuse.decode")) == 1
    assert len(counter.llm_token_counts) == 1


def test_where_one_response_is_used_one_is_drawn():
    class Sum(BaseModel):
        total: int

    with scripted_engine(lambda prompt: '{"total": 3}') as engine:
        llm = create(engine=engine, n=3, temperature=0.1, enforce=False)
        with recorded() as record:
            assert llm.structured_predict(Sum, PromptTemplate("1 + 2?")).total == 3
            assert [*llm.stream_structured_predict(Sum, PromptTemplate("1 + 2?"))][-1].total == 3
            assert llm.choose("1 + 2?", ["3", "4"]).text in ("3", "4")
    assert {start.options["n"] for start in record.named("AdaFuseGenerationStartEvent")} == {1}


@pytest.mark.quick
@pytest.mark.parametrize("path", PATHS)
async def test_n_that_cannot_be_is_refused(engine, path):
    llm = create(engine=engine, n=2, temperature=1)
    with recorded() as record, pytest.raises(InvalidOptionError, match="option 'n'"):
        await ask(llm, path, asked(path), temperature=1 if path in STREAMS else 0)
    assert len(record.closed("AdaFuse.decode")) == 1
    assert (await ask(llm, path, asked(path), n=1)).text


@pytest.mark.quick
def test_temperature_and_max_tokens_can_be_read_and_set(engine):
    llm: Any = AdaFuseLLM.from_embedded()
    assert (llm.temperature, llm.max_tokens) == (0, 256)
    configured = AdaFuseEngine(engine.backends, engine.config.override(DRAWN))
    llm = create(engine=configured)
    assert (llm.temperature, llm.max_tokens) == (1, 12)
    llm.temperature, llm.max_tokens = 0, 3
    assert (llm.temperature, llm.max_tokens, llm.max_new_tokens) == (0, 3, 3)
    assert llm.metadata.num_output == 3
    assert llm.complete("Paint!").text == " red" * 3
    with pytest.raises(InvalidOptionError, match="max_new_tokens"):
        llm.max_tokens = 0
    llm.max_tokens, llm.temperature = None, None
    assert llm.max_tokens == 12
    assert llm.complete("Paint!").raw.seed is not None


# Log-probabilities ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_log_probabilities_are_those_of_the_leading_member(engine, path):
    for options, member in (({}, "oak"), ({"weights": {"oak": 1, "elm": 2}}, "elm")):
        llm = create(engine=engine, logprobs=True, top_logprobs=2, **options)
        given = getattr(llm, path)(asked(path))
        given = await given if path.startswith("a") else given
        if path.startswith("astream"):
            responses = [each async for each in given]
        else:
            responses = list(given) if path in STREAMS else [given]
        tokens = [token for each in responses for token in each.logprobs]
        assert "".join(token[0].token for token in tokens) == " red" * 8
        for response in responses:
            shown = openai_logprobs(response.raw.rounds, member)["content"]
            assert [token[0].token for token in response.logprobs] == [e["token"] for e in shown]
        first = [(each.token, round(each.logprob, 3)) for each in tokens[0]]
        red, other = {"oak": (-0.916, -1.204), "elm": (-0.693, -1.386)}[member]
        assert first == [(" red", red), (" green", other)]
        assert tokens[0][0] == LogProb(token=" red", logprob=tokens[0][0].logprob, bytes=[*b" red"])
        assert {*responses[0].raw.rounds[0].logprobs} == {"oak", "elm"}


def test_replies_with_tools_have_log_probabilities():
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    with scripted_engine(lambda prompt: "I only add.") as engine:
        llm = create(engine=engine, enforce=False, logprobs=True)
        reply = llm.chat_with_tools([FunctionTool.from_defaults(add)], "What can you do?")
    assert "".join(token[0].token for token in reply.logprobs).startswith("I only add.")
