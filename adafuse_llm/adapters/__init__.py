"""Code that the server and the integrations share. It imports no framework.

It has ensembles that load on first use, the conversion of conversations and tools, the form of
replies, and a reader of replies while they grow.
"""
