"""Checkpoints and keyed optimizers in the loops of other frameworks, which must be installed; one file for each.

Nothing here is imported by the rest of the package, and nothing is gathered in this file: as each file
needs its framework.
"""
