"""One module at a time, in one process, or the harness itself."""
