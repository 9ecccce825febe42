"""LangChain's standard tests of chat models, over two scripted members."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_adafuse import ChatAdaFuse
from tests.support.instruction_follower import answer
from tests.support.models import STRICT
from tests.support.scripted import save_scripted


@functools.cache
def saved_members() -> list[str]:
    folder = Path(tempfile.mkdtemp())
    return [
        save_scripted(folder / "ink", answer),
        save_scripted(folder / "quill", answer, "sentencepiece", STRICT),
    ]


class OfEnsemble:
    @property
    def chat_model_class(self) -> type[ChatAdaFuse]:
        return ChatAdaFuse


class TestUnit(OfEnsemble, ChatModelUnitTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"members": ["ink", "quill"]}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"ADAFUSE_MEMBERS": "ink,quill"}, {}, {"members": ["ink", "quill"]}

    @pytest.fixture(autouse=True)
    def _allowed_to_load(self, monkeypatch):
        """`load(allowed_objects="all")` knows the packages of LangChain's own repository only;
        users of others pass ``allowed_objects=[ChatAdaFuse]``.
        """
        loading = sys.modules["langchain_core.load.load"]
        path = tuple(ChatAdaFuse.lc_id())
        monkeypatch.setitem(loading.ALL_SERIALIZABLE_MAPPINGS, path, path)
        monkeypatch.setattr(loading, "_default_class_paths_cache", {})


class TestIntegration(OfEnsemble, ChatModelIntegrationTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"members": saved_members()}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {**super().standard_chat_model_params, "max_tokens": 300}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "quill"
