"""Matching a checkpoint with an app, before a byte has changed: names, strictness, comparison."""
