"""Measure what the ensemble costs, compared with the alternatives.

    python -m benchmarks.speed                         # everything; 30 to 45 minutes on 2 cores
    python -m benchmarks.speed --quick                 # the same at toy sizes; about a minute
    python -m benchmarks.speed --only base quotes --output speed.json --markdown speed.md

The benchmark varies one of these at a time around a base point: the lengths of prompt and response,
B, the number of members, and the number of concurrent requests. Its output states the sizes. The
systems of one comparison take turns in one process, on one thread, after a warm-up, with the same
members and prompts.

``members``      the members, and prompts of a given length
``peers``        the alternatives: generate(), the paper's loop, UniTE, GaC
``script``       random-weight members that write a scripted text
``measure``      timing, rows, targets, the Markdown table
``comparisons``  one function per comparison
``branches``     counts of passes and tokens by what forced them
``memory``       memory measurements, each in a separate process
``first_words``  time and memory until the first words
``start_up``     the time from a command to its first words, by parts
``servers``      members on inference servers, compared with the same members in this process

``kinds`` is a command of its own. It measures GGUF members.
"""
