"""The tables of the AdaFuse paper: every system answers every task once, and tables compare them.

tasks       the prompts, options and metrics of the tasks
metrics     compare answers with accepted answers
statistics  intervals and paired tests
suites      the systems of each table
decode      answer the questions, save every answer, and resume
tables      the tables as Markdown and JSON
"""
