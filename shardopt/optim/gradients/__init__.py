"""Local gradients, norms that count every element once, and loss scaling."""
