"""Families of models: rules for rearranging, against models of transformers."""
