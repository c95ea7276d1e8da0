"""Local gradients, and norms that count every element once."""
