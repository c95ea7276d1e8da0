"""Reads bytes of an open checkpoint into the memory of tensors."""
