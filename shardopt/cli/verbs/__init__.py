"""Verbs of the command line, a file each; `table.py` beside this folder lists them."""
