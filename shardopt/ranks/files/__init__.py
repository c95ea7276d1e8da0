"""Bytes of files that ranks of other hosts ask for, over connections of their own beside those of rounds.

The client imports from the server what requests and replies look like.
"""
