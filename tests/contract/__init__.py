"""One suite per contract, run over every backend and every algorithm."""
