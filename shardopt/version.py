"""The version of this package, which `pyproject.toml` reads, and how manifests name it."""

__version__ = "0.2.0.dev0"

WRITER = f"shardopt {__version__}"
"""What `written_by` of a manifest says."""
