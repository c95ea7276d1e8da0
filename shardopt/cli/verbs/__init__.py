"""Verbs of the command line, a file each; `cli/table.py` lists them, and `cli/plot/` has those that draw."""
