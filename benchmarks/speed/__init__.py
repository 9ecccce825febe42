"""Measure what an ensemble costs, compared with its members alone.

    python -m benchmarks.speed                       # the embedded members; a few minutes
    python -m benchmarks.speed --quick               # the same at toy sizes
    python -m benchmarks.speed --suite real --only generate gguf --output FILE

All systems answer the same chats in turns, in one process and with one thread, after an untimed
chat. Costs are CPU seconds per byte of text, so other programs on the machine change them little,
and texts may have different lengths. Results are ratios of systems of the same run, as medians over
the chats.

``measure``      costs, lines of the table, the machine
``suites``       the members and chats of the suites
``comparisons``  one function per comparison
"""
