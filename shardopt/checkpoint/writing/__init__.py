"""From memory to data files, and saves that go on in the background."""
