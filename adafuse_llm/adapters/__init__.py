"""Code that the server and the integrations share. It imports no framework.

Its modules load ensembles on first use, convert conversations and tools, enforce the form of a
reply (tool calls or a schema), and read replies while they grow.
"""
