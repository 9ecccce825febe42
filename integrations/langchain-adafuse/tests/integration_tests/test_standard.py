"""LangChain's standard integration tests of chat models, over the embedded members."""

import json
import re
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from adafuse_llm import AdaFuseEngine
from adafuse_llm.backends import FakeBackend
from adafuse_llm.backends.fake import END
from adafuse_llm.embedded import member_paths
from langchain_adafuse import ChatAdaFuse

pytestmark = [pytest.mark.disable_socket, pytest.mark.slow]

NEED_OBEDIENCE = {
    *("test_json_mode", "test_tool_calling", "test_tool_calling_async"),
    "test_unicode_tool_call_integration",
}
"""Tests that need calls with certain arguments, which the embedded members do not write."""


def obey(text: str) -> dict[str, float]:
    """Write what the tests of `NEED_OBEDIENCE` ask for, one character after the other."""
    prompt, _, written = text.rpartition("Assistant:")
    asked: dict[str, Any] = {"setup": "Why are cats good sailors?", "punchline": "They land well."}
    if named := re.findall("named '([^']+)'", prompt):
        arguments = {"customer_name": named[-1], "description": "a company"}
        asked = {"name": "unicode_customer", "arguments": arguments}
    elif "magic_function" in prompt:
        asked = {"name": "magic_function", "arguments": {"input": 3}}
    reply = json.dumps(asked, ensure_ascii=False)
    if "name" in asked:
        reply = f"<tool_call>{reply}</tool_call>"
    return {f" {reply}"[len(written) :][:1] or END: 1.0}


class TestIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatAdaFuse]:
        return ChatAdaFuse

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"members": member_paths()[:2], "branching_factor": 1}

    @pytest.fixture
    def model(self, request: Any) -> BaseChatModel:
        params = {**self.standard_chat_model_params, **getattr(request, "param", {})}
        if request.node.originalname in NEED_OBEDIENCE:
            members = [FakeBackend("ink", obey), FakeBackend("quill", obey)]
            return ChatAdaFuse(engine=AdaFuseEngine(members), enforce=False, **params)
        return ChatAdaFuse(**self.chat_model_params, **params)

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "heron"
