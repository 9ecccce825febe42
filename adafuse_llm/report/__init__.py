"""Displays of one or many generations and their decisions, in a terminal and as HTML."""
