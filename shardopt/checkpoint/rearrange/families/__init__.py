"""Rules for models whose tensors Hugging Face names and arranges otherwise than others do."""
