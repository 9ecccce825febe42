"""Algorithm 1 over token trees, without tensors, threads or frameworks.

Every function in this package that needs a model is a generator. It yields `Ask` objects, with
queries to members. The driver (`adafuse_llm.runtime.scheduler`) decides when to evaluate the
queries and which of them to batch. It resumes the generator once the trees hold the results.

    rounds    one round of Algorithm 1, and rounds until the response ends: start here
    propose   a member's spans: greedy words, and branches where it is not confident
    score     the pool of candidates, and the fused score
    member    the state of one member in one request
    permits   the tokens that a grammar, or spaces at the end of the prompt, allow next
    draws     the random numbers with which each node draws its next token
    draft     drafts: tokens that a pass evaluates before the algorithm needs them
"""
