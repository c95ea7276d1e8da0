"""Islands of ranks: when they meet (`schedule`), what they agree on (`islands`), flat buffers to add up (`buckets`)."""
