"""Displays of a generation and its decisions.

terminal  tables and spans in a terminal and in a notebook
styles    the mark and the color of each member
"""
