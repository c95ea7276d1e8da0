"""Converts checkpoints to other formats, or to our own again: streamed, collective, resumable, atomic."""
