"""Sharded results against a slow, obvious, single-process reference."""
