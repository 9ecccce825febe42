"""Trees of tokens that members evaluate; rules that adjust distributions and draw tokens."""
