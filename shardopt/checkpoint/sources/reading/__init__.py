"""An open checkpoint, and its bytes into the memory of tensors."""
