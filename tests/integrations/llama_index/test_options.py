"""Options that users of other LLMs know: sampling, log-probabilities, several responses."""

from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, LogProb
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.adafuse import AdaFuseLLM, AdaFuseRaw
from pydantic import BaseModel

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from tests.support.llama_calls import ask, recorded
from tests.support.scripted import scripted_engine

pytestmark = pytest.mark.quick

WORDS = {" red": 0.4, " green": 0.3, " blue": 0.3}
DRAWN: dict[str, Any] = {"temperature": 1, "max_new_tokens": 12}


def colours(share: float) -> Any:
    """A rule that writes up to eight colours, of which red has the probability `share`."""

    def rule(text: str) -> dict[str, float]:
        if sum(text.count(word) for word in WORDS) >= 8:
            return {"<end>": 0.99, " red": 0.01}
        rest = {word: (1 - share) * p / 0.6 for word, p in WORDS.items() if word != " red"}
        return {" red": share, **rest}

    return rule


@pytest.fixture(scope="module")
def engine():
    members = [FakeBackend("oak", colours(0.4)), FakeBackend("elm", colours(0.5))]
    with AdaFuseEngine(members) as engine:
        yield engine


@pytest.mark.parametrize("path", ["complete", "achat"])
async def test_n_responses_are_one_response_and_its_alternatives(engine, path):
    counter = TokenCountingHandler()
    llm = AdaFuseLLM(engine=engine, n=3, callback_manager=CallbackManager([counter]), **DRAWN)
    with recorded() as record:
        said = await ask(llm, path, "Paint!", seed=3)
    raw = said.raw
    texts = [(said.text, raw.seed), *((each.text, each.seed) for each in raw.alternatives)]
    assert len(texts) == 3
    for text, seed in texts:
        assert (await ask(llm, path, "Paint!", seed=seed, n=1)).text == text
    assert AdaFuseRaw.model_validate_json(raw.model_dump_json()) == raw
    rounds = [event.text for event in record.named("AdaFuseRoundEvent")]
    assert rounds == [each.text for each in raw.rounds]
    assert len(counter.llm_token_counts) == 1 + 3


class Sum(BaseModel):
    total: int


def test_where_one_response_is_used_one_is_drawn():
    with scripted_engine(lambda _: '{"total": 3}') as engine, recorded() as record:
        llm: Any = AdaFuseLLM(engine=engine, n=3, temperature=0.1, enforce=False)
        assert llm.structured_predict(Sum, PromptTemplate("1 + 2?")).total == 3
        assert [*llm.stream_structured_predict(Sum, PromptTemplate("1 + 2?"))][-1].total == 3
    assert not any(end.response.raw.alternatives for end in record.named("LLMChatEndEvent"))


def test_log_probabilities_are_those_of_the_leading_member(engine):
    llm: Any = AdaFuseLLM(engine=engine, top_logprobs=2, weights={"oak": 1.0, "elm": 2.0})
    whole, chunks = llm.complete("Paint!"), [*llm.stream_chat([ChatMessage("Paint!")])]
    for responses in ([whole], chunks):
        tokens = [token for each in responses for token in each.logprobs]
        assert [token[0].token for token in tokens] == [" red"] * 8
        first = [(each.token, round(each.logprob, 3)) for each in tokens[0]]
        assert first == [(" red", -0.693), (" green", -1.386)]
    assert tokens[0][0] == LogProb(token=" red", logprob=tokens[0][0].logprob, bytes=[*b" red"])
    assert {*whole.raw.rounds[0].logprobs} == {"oak", "elm"}


def test_a_text_counts_as_many_tokens_as_the_member_that_needs_the_most():
    text = "The middle of the mill report"
    with scripted_engine(lambda _: "Yes.") as engine:
        sizes = {len(ids) for ids in engine.encode_text(text).values()}
        assert len(sizes) == 2
        assert len(AdaFuseLLM(engine=engine).tokenizer(text)) == max(sizes)


def test_a_program_mode_has_no_effect_and_a_warning_says_so(engine, caplog):
    AdaFuseLLM(engine=engine, pydantic_program_mode="default")
    assert not caplog.messages
    AdaFuseLLM(engine=engine, pydantic_program_mode="function")
    assert "pydantic_program_mode has no effect" in caplog.text
