"""Writes checkpoints in the formats of others, and anew in our own: streamed, collective, resumable, atomic."""
