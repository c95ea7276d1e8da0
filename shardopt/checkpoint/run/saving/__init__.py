"""A save of a run, and what follows its commit behind the training."""
