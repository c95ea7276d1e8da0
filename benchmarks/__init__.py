"""Measurements against torch's own in the same run: `python -m benchmarks.<name>`, from the root of the repository."""
