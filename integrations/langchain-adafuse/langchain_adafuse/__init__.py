"""LangChain models backed by an ensemble of local language models (AdaFuse)."""

from __future__ import annotations

from langchain_adafuse.callbacks import RoundCallbackHandler, get_round_callback
from langchain_adafuse.chat_models import ChatAdaFuse
from langchain_adafuse.decisions import AdaFuseDecisions, AdaFuseResponse
from langchain_adafuse.llms import AdaFuseLLM

__all__ = [
    "AdaFuseDecisions",
    "AdaFuseLLM",
    "AdaFuseResponse",
    "ChatAdaFuse",
    "RoundCallbackHandler",
    "get_round_callback",
]
