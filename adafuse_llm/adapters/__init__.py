"""Code that the integrations of frameworks and the server share. It imports no framework.

It has ensembles that load on first use, conversations with tools, the form of replies, and a reader
of replies as they grow.
"""
