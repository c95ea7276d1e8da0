"""Loads checkpoints into apps: matches names, checks strictness and compares before any byte changes."""
