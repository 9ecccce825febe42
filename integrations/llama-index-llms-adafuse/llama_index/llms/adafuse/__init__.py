"""A LlamaIndex LLM, selector and filter, backed by an ensemble of local language models."""

from __future__ import annotations

from llama_index.llms.adafuse.base import AdaFuseLLM
from llama_index.llms.adafuse.decisions import AdaFuseRelevance, AdaFuseSelector
from llama_index.llms.adafuse.events import AdaFuseRoundEvent
from llama_index.llms.adafuse.raw import AdaFuseRaw, TokenUsage

__all__ = [
    "AdaFuseLLM",
    "AdaFuseRaw",
    "AdaFuseRelevance",
    "AdaFuseRoundEvent",
    "AdaFuseSelector",
    "TokenUsage",
]
