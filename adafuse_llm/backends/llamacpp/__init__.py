"""GGUF models as members, with llama.cpp (the extra ``gguf``)."""

from adafuse_llm.backends.llamacpp.backend import LlamaCppBackend

__all__ = ["LlamaCppBackend"]
