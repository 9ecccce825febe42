"""Code that the framework integrations share.

It provides ensembles that load on first use, conversations with tools, the form of replies, and a
reader of replies as they grow. These modules import no framework and run no model.
"""
