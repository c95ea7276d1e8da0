# PYTHON_ARGCOMPLETE_OK
"""The command `shardopt`: looks into checkpoints, compares, verifies and rewrites them, without a job."""

from shardopt.cli.entry import main

__all__ = ["main"]
