"""What the ensemble costs, beside what else could be run: ``python -m benchmarks.speed``.

    python -m benchmarks.speed                         # everything; at most 15 minutes on 2 cores
    python -m benchmarks.speed --quick                 # the same at toy sizes, about a minute
    python -m benchmarks.speed --only base quotes --output speed.json --markdown speed.md

The axes (prompt, response, B, members, requests at once) are measured one at a time around a base
point; the output says what was run. Systems of one comparison take turns in one process, after a
warm-up, with the same members and prompts, one thread.

``members``      the members, and prompts of a given length
``peers``        what the engine is compared with: generate(), the paper's loop, UniTE, GaC
``script``       random-weight members that say what they are told to
``measure``      timing, rows, targets, the Markdown table
``comparisons``  one function per comparison
``memory``       what is measured in a process of its own
"""
