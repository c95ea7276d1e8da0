"""Checkpoints on several hosts, each with a directory of its own for its share.

Each file imports only those before it: directory (a host's directory, and who may use it), spare (files that are to be
written over), share (a host's share of one checkpoint), hosts (which ranks share a directory, and how they reach those
of others), holders (which host has which file), whole (all shares of a checkpoint as one storage), finding (what is
whole somewhere), copying (shares of neighbours).
"""
