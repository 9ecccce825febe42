"""Displays of a generation and its decisions.

terminal  tables and spans in a terminal and in a notebook
styles    marks and colors of members, and texts of all displays
"""
