"""The optimizers: a tree of nodes, whose leaves own parameters."""
