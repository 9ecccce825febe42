"""Displays of one or many generations and their decisions.

terminal    tables and spans in a terminal
page        HTML pages and notebook output, from the ``.jinja`` templates
charts      charts of the pages
styles      the mark and the color of each member
json_lines  read results that commands wrote
"""
