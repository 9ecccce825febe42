"""Text processing without models: words, tokens, chat templates and stop sequences."""
