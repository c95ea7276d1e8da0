"""Optimizers of embedding tables with one second moment per row."""
