"""The format on disk: constants, the manifest, data files, metrics, and the bytes of tensors."""
