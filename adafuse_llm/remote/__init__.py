"""Engines on other machines: their client, and the data on the wire."""
