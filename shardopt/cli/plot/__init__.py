"""Verbs that draw pictures with matplotlib."""
