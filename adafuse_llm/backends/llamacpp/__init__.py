"""GGUF models as members, with llama.cpp (the extra ``gguf``)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adafuse_llm.backends.llamacpp.backend import LlamaCppBackend

__all__ = ["LlamaCppBackend"]


def __getattr__(name: str) -> Any:
    """Import `LlamaCppBackend` only if it is used, because it needs torch."""
    if name == "LlamaCppBackend":
        from adafuse_llm.backends.llamacpp.backend import LlamaCppBackend

        return LlamaCppBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
