"""Run LangChain's standard tests of chat models on `ChatHuggingFace`.

    pip install --no-deps langchain-huggingface
    python benchmarks/langchain_standard_tests.py

langchain-huggingface requires versions of huggingface-hub that transformers 5 does not support. It
also works with newer versions, so install it without its dependencies. The model is a scripted one,
in a local pipeline, which answers the tests as they ask. The same tests of our integration are in
``integrations/langchain-adafuse/tests``.

The command prints pytest's summary of the 60 tests, for comparison with our integration.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

MISSING = "Install langchain-huggingface first: pip install --no-deps langchain-huggingface"


@functools.cache
def pipeline() -> Any:
    """Make a text-generation pipeline with a scripted member."""
    from langchain_huggingface import HuggingFacePipeline

    from tests.support.instruction_follower import answer
    from tests.support.scripted import save_scripted

    return HuggingFacePipeline.from_model_id(
        save_scripted(tempfile.mkdtemp(), answer),
        task="text-generation",
        pipeline_kwargs={"max_new_tokens": 300, "return_full_text": False},
    )


class OnePipeline:
    @property
    def chat_model_class(self) -> Any:
        from langchain_huggingface import ChatHuggingFace

        return ChatHuggingFace

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"llm": pipeline()}


class TestUnit(OnePipeline, ChatModelUnitTests):
    """LangChain's unit tests of chat models (10 tests)."""


class TestIntegration(OnePipeline, ChatModelIntegrationTests):
    """LangChain's integration tests of chat models (50 tests)."""

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "quill"


def main() -> int:
    """Run the tests and return the exit code. Failed tests are a result, not an error."""
    try:
        import langchain_huggingface  # noqa: F401
    except ImportError:
        sys.exit(MISSING)
    own = ("--disable-socket", "--allow-unix-socket", "--timeout", "20", "--benchmark-disable")
    return int(pytest.main([__file__, "-q", "--tb=no", "-p", "no:cacheprovider", *own]) > 1)


if __name__ == "__main__":
    sys.exit(main())
