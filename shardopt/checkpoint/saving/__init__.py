"""Saving: describe, agree, assign, stage, write, commit."""
