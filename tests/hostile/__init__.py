"""Inputs made to mislead: each must be refused, by name."""
