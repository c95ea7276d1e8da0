"""Real ranks: collectives, resharding, faults."""
