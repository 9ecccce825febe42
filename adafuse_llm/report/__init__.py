"""Decisions to look at: a generation, or many, in a terminal and as HTML."""
