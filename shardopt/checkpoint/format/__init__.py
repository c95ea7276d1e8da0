"""What lies on disk: constants, the manifest, data files, and the bytes of tensors."""
