"""Make the paper's tables and figures from recorded answers.

The command is ``python -m benchmarks.paper``; see its ``--help``.

command  the command, which decodes missing answers and shows the report
layout   the systems in each table, and suite files
run      decoding, which decodes each answer once and can be resumed
report   tables, tests and claims as plain data
long     analysis of answers with several sentences, a part of the report
sheets   the report as tables of text, for terminals, Markdown and HTML
page     the report as an HTML page with charts
"""
