"""Steps a torch optimizer on local tensors."""
