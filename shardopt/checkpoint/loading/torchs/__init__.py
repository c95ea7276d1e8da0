"""What loads do about torch's own optimizers: makes state to load into, and keeps the dtypes of what was loaded."""
