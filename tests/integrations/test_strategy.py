"""The option `strategy` of the models of both frameworks."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.chat_models import init_chat_model
from llama_index.core.llms import ChatMessage
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import AdaFuseEngine, InvalidOptionError
from adafuse_llm.strategies import FixedWords
from langchain_adafuse import AdaFuseLLM as TextModel
from langchain_adafuse import ChatAdaFuse
from tests.support.scripted import scripted_engine

QUESTION = "Who are you, and what can you do?"
KINDS: list[Any] = [ChatAdaFuse, TextModel, AdaFuseLLM]


def engine_of(model: Any) -> AdaFuseEngine:
    engine: AdaFuseEngine = model._ensemble.engine()
    return engine


def test_models_that_differ_only_in_the_strategy_share_their_members() -> None:
    options: Any = {"use": ["heron"], "max_new_tokens": 12}
    models = [kind.from_embedded(strategy="single", **options) for kind in KINDS]
    plain = ChatAdaFuse.from_embedded(**options)
    for model in models:
        assert engine_of(model).strategy.name == "single"
        assert engine_of(model).backends == engine_of(plain).backends
    single = engine_of(plain).with_strategy("single")
    turns = [{"role": "user", "content": QUESTION}]
    expected = single.generate(messages=turns, **options).text
    assert expected != engine_of(plain).generate(messages=turns, max_new_tokens=12).text
    replied, answered = models[0].invoke(QUESTION), models[2].chat([ChatMessage(content=QUESTION)])
    assert replied.content == answered.message.content == expected
    assert replied.response_metadata["strategy"] == answered.raw.strategy == "single"
    assert models[0]._identifying_params != plain._identifying_params


@pytest.mark.parametrize("kind", KINDS)
def test_a_strategy_is_checked_at_once(kind: Any) -> None:
    with pytest.raises(InvalidOptionError, match=r"strategy must be one of.*Did you mean 'single'"):
        kind.from_embedded(strategy="sngle")
    with (
        scripted_engine(lambda prompt: "Yes.") as engine,
        pytest.raises(ValueError, match=r"engine= (and strategy= )?cannot be combined"),
    ):
        kind(engine=engine, strategy="single")


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_file_has_the_strategy(kind: Any, tmp_path: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("strategy: mixture\nmax_new_tokens: 8\n")
    model = kind.from_config(path)
    assert engine_of(model).strategy.name == "mixture"
    assert model.max_new_tokens == 8
    path.write_text("strategy: mixtur\n")
    with pytest.raises(InvalidOptionError, match="Did you mean 'mixture'"):
        kind.from_config(path)


@pytest.mark.quick
def test_a_strategy_without_grammars_enforces_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FixedWords, "options", frozenset())
    plain, strategy = ChatAdaFuse.from_embedded(), ChatAdaFuse.from_embedded(strategy="fixed-1")
    plain.unload()
    for _ in range(2):
        assert plain._ensemble.can_enforce()
        assert not strategy._ensemble.can_enforce()
        plain.warmup()
    plain.unload()


@pytest.mark.quick
def test_init_chat_model_knows_no_packages_of_others() -> None:
    with pytest.raises(ValueError, match="adafuse") as caught:
        init_chat_model("adafuse:any")
    changed = "langchain has changed: see init_chat_model in docs/guides/langchain.md"
    assert "provider" in str(caught.value), changed
