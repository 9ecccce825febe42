"""LangChain's standard unit tests of chat models. No member is loaded."""

import sys
from typing import Any

import pytest
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_adafuse import ChatAdaFuse


@pytest.mark.quick
class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatAdaFuse]:
        return ChatAdaFuse

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
