"""torch's own files, read without running their pickles."""
