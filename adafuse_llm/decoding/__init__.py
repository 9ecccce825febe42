"""Algorithm 1 over token trees: no tensors, no threads, no frameworks.

Every function here that needs a model is a generator: it yields an `Asking` (which member, which
nodes) and is resumed once the tree holds the answer. Who evaluates, when, and together with what,
is the driver's business (`adafuse_llm.scheduler`).
"""
