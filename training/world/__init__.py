"""A generated small-town world: names, facts, passages, questions, word problems.

The generator is pure Python and seeded: the same seed gives the same text on every machine.
Each text belongs to one of two splits, ``train`` and ``heldout``. Both splits use the same
syllables and sentence patterns. No made-up word, number, year, price, date, time, address or
arithmetic problem occurs in both, so a model can answer a held-out question only by reading.

    words        made-up words, and the split of a word or number
    names        draws names and values for one split
    cases        questions with their passages and exact answers
    relations    patterns that state a fact, ask for it and list it
    entities     institutions, persons, products, places and events, with passages and questions
    scenes       several passages, and the cases about them
    problems     arithmetic word problems and sums
    long_cases   questions with long answers: several parts, summaries, problems of several steps
    agent_cases  questions with the tool calls that lead to their answers
"""
