"""Writes checkpoints in the formats of others, and again in our own: streamed, collective, resumable, atomic."""
