"""The options that type checkers know are those that exist. `make lint` checks `uses.py`."""

from __future__ import annotations

import pytest
from llama_index.llms import adafuse as li

import langchain_adafuse as lc
from adafuse_llm import AdaFuseConfig
from adafuse_llm.config import DecodeOptions


@pytest.mark.quick
def test_typed_options_are_the_options_and_fields_of_all_models() -> None:
    assert {*DecodeOptions.__annotations__} == {*AdaFuseConfig.model_fields}
    for kind in (lc.AdaFuseLLM, lc.ChatAdaFuse, li.AdaFuseLLM):
        assert {kind.model_fields[name].default for name in AdaFuseConfig.model_fields} == {None}
