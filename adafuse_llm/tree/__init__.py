"""What members evaluate: trees of tokens, and how their probabilities are adjusted and drawn."""
