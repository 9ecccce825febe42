"""The options that type checkers know are those that exist. `make lint` checks `uses.py`."""

from __future__ import annotations

import pytest

from adafuse_llm import AdaFuseConfig
from adafuse_llm.adapters.options import ALIASES
from adafuse_llm.config import DecodeOptions


@pytest.mark.quick
def test_the_typed_options_are_the_options() -> None:
    assert {*DecodeOptions.__annotations__} == {*AdaFuseConfig.model_fields}


@pytest.mark.quick
def test_the_typed_keywords_of_langchains_models_are_their_fields() -> None:
    from langchain_adafuse import AdaFuseLLM, ChatAdaFuse
    from langchain_adafuse._model import IGNORED, ModelFields

    fields = {*AdaFuseLLM.model_fields, *ChatAdaFuse.model_fields}
    assert {*ModelFields.__annotations__} == {*fields, *ALIASES, *IGNORED, "model"}


@pytest.mark.quick
def test_the_typed_keywords_of_the_llama_index_llm_are_its_fields() -> None:
    from llama_index.llms.adafuse import AdaFuseLLM
    from llama_index.llms.adafuse.base import LLMOptions

    named = {"members", "engine"}  # parameters of their own
    fields = {*AdaFuseLLM.model_fields, *ALIASES}
    assert {*LLMOptions.__annotations__} == fields - named
