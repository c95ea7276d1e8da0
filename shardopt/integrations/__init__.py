"""Checkpoints and keyed optimizers inside of other frameworks' loops: a file for each framework, which must be installed.

Nothing here is imported by the rest of the package, and nothing is gathered in this file: each import needs a framework.
"""
