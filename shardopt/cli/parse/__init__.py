"""Verbs as data, and the parsers that are made of them."""
