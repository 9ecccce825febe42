"""Displays of a generation and its decisions.

terminal  tables and spans in a terminal
page      output of notebooks, from the ``.jinja`` templates
styles    the mark and the color of each member
"""
