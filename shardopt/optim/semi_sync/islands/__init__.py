"""Islands of ranks: when they meet (`schedule`), what they agree on (`islands`), and flat buffers (`buckets`)."""
