"""Reads torch's own files without running their pickles."""
