"""The saved form of optimizers, and how it is loaded."""
