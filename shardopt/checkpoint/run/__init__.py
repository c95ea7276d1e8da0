"""The checkpoints of a training run, by step."""
