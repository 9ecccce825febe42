"""What every framework integration needs, once: ensembles that load late, conversations with tools
as plain messages, replies taken apart as they stream, structured output.

Nothing here knows a framework, and nothing computes.
"""
