"""The options that type checkers know are those that exist. `make lint` checks `uses.py`."""

from __future__ import annotations

import pytest
from llama_index.llms import adafuse as li
from llama_index.llms.adafuse.base import LLMOptions

import langchain_adafuse as lc
from adafuse_llm import AdaFuseConfig
from adafuse_llm.adapters.options import ALIASES, Transport
from adafuse_llm.config import DecodeOptions
from langchain_adafuse._model import ModelFields
from langchain_adafuse.chat_models import ChatFields


@pytest.mark.quick
def test_typed_options_and_keywords_are_the_options_and_fields() -> None:
    assert {*DecodeOptions.__annotations__} == {*AdaFuseConfig.model_fields}
    for kind in (lc.AdaFuseLLM, lc.ChatAdaFuse, li.AdaFuseLLM):
        assert {kind.model_fields[name].default for name in AdaFuseConfig.model_fields} == {None}
    keywords = {*ALIASES, *Transport.__annotations__}
    assert {*ModelFields.__annotations__} == {*lc.AdaFuseLLM.model_fields, *keywords, "model"}
    assert {*ChatFields.__annotations__} == {*lc.ChatAdaFuse.model_fields, *keywords, "model"}
    own = {"members", "engine"}  # parameters of the class itself
    assert {*LLMOptions.__annotations__} == {*li.AdaFuseLLM.model_fields, *keywords} - own
