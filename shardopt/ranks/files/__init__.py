"""Bytes of files that ranks of other hosts ask for, over connections of their own beside those of rounds.

Each file imports only those before it: asking (requests and replies as bytes), server, client.
"""
