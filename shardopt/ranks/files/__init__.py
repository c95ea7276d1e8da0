"""Serves files to ranks of other hosts, over connections of their own beside those of rounds.

The client imports from the server what requests and replies look like.
"""
