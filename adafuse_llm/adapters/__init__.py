"""Code that the framework integrations share.

It provides ensembles that load on first use, conversations with tools as plain messages, parsers
for streamed replies, and structured output. These modules import no framework and run no model.
"""
