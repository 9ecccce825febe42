"""Algorithm 1 over token trees: no tensors, no threads, no frameworks.

Every function here that needs a model is a generator: it yields `MemberQuery`s (which member, which
nodes) and is resumed once the trees hold the answers. Who evaluates, when, and together with what,
is the driver's business (`adafuse_llm.runtime.scheduler`).
"""
