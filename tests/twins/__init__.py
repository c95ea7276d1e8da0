"""Generated runs: a sharded optimizer, and a plain one of torch in one process, go through the same changes."""
