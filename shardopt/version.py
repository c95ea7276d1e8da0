"""The version of this package, from which `pyproject.toml` takes it."""

__version__ = "0.1.0.dev0"
