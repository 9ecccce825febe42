"""Text without models: words, continuations of a token sequence, chat prompts, stop sequences."""
