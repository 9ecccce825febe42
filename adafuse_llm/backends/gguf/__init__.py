"""Find GGUF files, and read facts from their headers. This needs neither llama.cpp nor torch."""

from adafuse_llm.backends.gguf.header import GGUFFacts, read_facts

__all__ = ["GGUFFacts", "read_facts"]
