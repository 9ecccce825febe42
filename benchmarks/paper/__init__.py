"""A paper's tables and figures, from recorded answers: ``python -m benchmarks.paper --help``.

command  run what is missing of a suite, then show it
layout   which systems stand in which table; suites as files
run      what has to be decoded, each answer once, resumable
report   tables, tests and claims as plain data
sheets   the same as cells of text, for terminals, Markdown and HTML
page     the same as an HTML page with charts
"""
