"""Algorithm 1 over token trees, without tensors, threads or frameworks.

Every function in this package that needs a model is a generator. It yields `MemberQuery`
objects, each with a member and the nodes to evaluate. The driver (`adafuse_llm.runtime.scheduler`)
decides when to evaluate the queries and which of them to batch. It resumes the generator once the
trees hold the results.
"""
