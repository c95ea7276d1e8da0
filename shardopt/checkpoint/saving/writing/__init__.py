"""Writing: copies to host memory, data files, and saves that go on in the background."""
