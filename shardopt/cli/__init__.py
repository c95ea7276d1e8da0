# PYTHON_ARGCOMPLETE_OK
"""The command `shardopt`: shows, compares, verifies and rewrites checkpoints, without a job."""

from shardopt.cli.entry import main as main
from shardopt.runtime.exports import offer as _offer

_offer(__name__)
