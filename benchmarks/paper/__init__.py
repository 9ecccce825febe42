"""The paper's tables and figures, from recorded answers: ``python -m benchmarks.paper --help``.

command  the command, which decodes missing answers and shows the report
layout   the systems in each table, and suite files
run      decoding of each answer once, resumable
report   tables, tests and claims as plain data
sheets   the report as tables of text, for terminals, Markdown and HTML
page     the report as an HTML page with charts
"""
