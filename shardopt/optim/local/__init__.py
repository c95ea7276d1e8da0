"""A step of a torch optimizer on local tensors."""
