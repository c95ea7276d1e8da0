"""The version of this package, which `pyproject.toml` reads."""

__version__ = "0.1.0.dev0"
