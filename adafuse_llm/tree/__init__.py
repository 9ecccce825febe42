"""Trees of tokens, whose nodes members evaluate, and the rules of adjustments and of drawing."""
