"""Algorithms that compute on whole parts of sharded parameters, each on one rank, its owner."""
