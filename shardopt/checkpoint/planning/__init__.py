"""The job's state and who writes which part of it: no I/O."""
