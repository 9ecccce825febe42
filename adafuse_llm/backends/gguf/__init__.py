"""Find GGUF files, and read facts from their headers. This needs neither llama.cpp nor torch."""
