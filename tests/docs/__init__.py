"""The documentation as tests: every code block runs, the site builds without a warning, the reference is complete."""
