"""All schedules: stages of a warm-up, ramps of decays, and torch's plateau scheduler over all ranks."""
