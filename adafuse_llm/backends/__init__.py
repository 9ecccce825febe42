"""Members: what answers the questions of the decoding algorithm."""
