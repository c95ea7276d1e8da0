"""L-BFGS on sharded parameters."""
