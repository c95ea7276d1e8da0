"""Estimates before a run: the bytes, host memory and seconds of saves and loads, and what retention keeps."""
