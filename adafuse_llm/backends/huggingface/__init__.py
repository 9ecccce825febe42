"""The backend for models from Hugging Face transformers."""

from __future__ import annotations

from adafuse_llm.backends.huggingface.backend import HuggingFaceBackend

__all__ = ["HuggingFaceBackend"]
