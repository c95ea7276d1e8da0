"""Where checkpoints come from: our own, and those of others, all read through one reader."""
