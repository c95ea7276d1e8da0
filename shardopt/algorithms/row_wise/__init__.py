"""Optimizers of tables, by their rows."""
