"""Checkpoints and keyed optimizers in the loops of other frameworks, one file for each; the framework must be
installed.

Nothing here is imported by the rest of the package, and nothing is gathered in this file: as each file
needs its framework.
"""
