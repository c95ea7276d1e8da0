"""Writes data files and copies to host memory, and tracks saves in the background."""
