"""Algorithm 1 over token trees, without tensors, threads or frameworks.

Every function in this package that needs a model is a generator. It yields `Ask` objects, with
queries to members. The driver (`adafuse_llm.runtime.scheduler`) decides when to evaluate the
queries and which of them to batch. It resumes the generator once the trees hold the results.

    rounds    one round of Algorithm 1, and rounds until the response ends: start here
    propose   a member's spans: greedy words, and branches where it is not confident
    score     the pool of candidates, and the fused score
    member    one member's side of one request
    permits   which tokens may follow, under a grammar or after spaces of the prompt
    draws     which random numbers each node draws with
    draft     lossless drafting: what a forward pass evaluates in addition
"""
