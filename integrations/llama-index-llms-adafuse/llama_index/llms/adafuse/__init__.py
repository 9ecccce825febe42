"""LlamaIndex LLM answered by an ensemble of local language models (AdaFuse)."""

from __future__ import annotations

from llama_index.llms.adafuse.base import AdaFuseLLM

__all__ = ["AdaFuseLLM"]
