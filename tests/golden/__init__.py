"""Stored bytes of every format version, which every later version must read."""
