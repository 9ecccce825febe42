"""GGUF models as members, with llama.cpp."""
