"""A LlamaIndex LLM backed by an ensemble of local language models (AdaFuse)."""

from __future__ import annotations

from llama_index.llms.adafuse.base import AdaFuseLLM
from llama_index.llms.adafuse.decisions import DecisionHandler, decisions_of
from llama_index.llms.adafuse.errors import AdaFuseLLMError
from llama_index.llms.adafuse.evaluation import AdaFuseFaithfulnessEvaluator
from llama_index.llms.adafuse.events import (
    AdaFuseGenerationEndEvent,
    AdaFuseGenerationStartEvent,
    AdaFuseRoundEvent,
)
from llama_index.llms.adafuse.raw import AdaFuseRaw, TokenUsage
from llama_index.llms.adafuse.selectors import (
    AdaFuseSelector,
    ScoredSelection,
    ScoredSelectorResult,
)

__all__ = [
    "AdaFuseFaithfulnessEvaluator",
    "AdaFuseGenerationEndEvent",
    "AdaFuseGenerationStartEvent",
    "AdaFuseLLM",
    "AdaFuseLLMError",
    "AdaFuseRaw",
    "AdaFuseRoundEvent",
    "AdaFuseSelector",
    "DecisionHandler",
    "ScoredSelection",
    "ScoredSelectorResult",
    "TokenUsage",
    "decisions_of",
]
