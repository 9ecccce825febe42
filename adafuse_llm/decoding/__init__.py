"""Algorithm 1 over token trees, without tensors, threads or frameworks.

Every function here that needs a model is a generator. It yields `MemberQuery` objects, each with a
member and the nodes to evaluate, and is resumed once the trees hold the results. The driver
(`adafuse_llm.runtime.scheduler`) decides when to evaluate the queries and which of them to batch.
"""
