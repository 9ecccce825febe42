"""The option `strategy` of the models of both frameworks."""

from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.adafuse import AdaFuseLLM

from adafuse_llm import InvalidOptionError
from adafuse_llm.adapters.ensembles import Ensemble
from adafuse_llm.strategies import Mixture
from langchain_adafuse import AdaFuseLLM as TextModel
from langchain_adafuse import ChatAdaFuse

KINDS: list[Any] = [ChatAdaFuse, TextModel, AdaFuseLLM]


def test_models_that_differ_only_in_the_strategy_share_their_members() -> None:
    options: Any = {"use": ["heron"], "max_new_tokens": 12}
    plain: Any = ChatAdaFuse.from_embedded(**options)
    engine = plain._ensemble.engine()
    models = [kind.from_embedded(strategy="single", **options) for kind in KINDS]
    for model in models:
        assert model._ensemble.engine().backends == engine.backends
    replied, answered = models[0].invoke("Hi"), models[2].chat([ChatMessage(content="Hi")])
    assert replied.response_metadata["strategy"] == answered.raw.strategy == "single"


@pytest.mark.parametrize("kind", KINDS)
def test_a_strategy_is_checked_at_once_and_can_be_in_a_file(kind: Any, tmp_path: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("strategy: mixture\nmax_new_tokens: 8\n")
    model = kind.from_config(path)
    assert model._ensemble.engine().strategy.name == "mixture"
    assert model.max_new_tokens == 8
    with pytest.raises(InvalidOptionError, match="Did you mean 'single'"):
        kind.from_embedded(strategy="sngle")


@pytest.mark.quick
def test_a_strategy_without_grammars_enforces_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mixture, "options", frozenset())
    plain, other = Ensemble("embedded"), Ensemble("embedded", strategy="mixture")
    for prepare in (plain.unload, plain.engine):
        prepare()
        assert plain.can_enforce()
        assert not other.can_enforce()
