"""LangChain models answered by an ensemble of local language models (AdaFuse)."""

from __future__ import annotations

from langchain_adafuse.llms import AdaFuseLLM

__all__ = ["AdaFuseLLM"]
