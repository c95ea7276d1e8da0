# PYTHON_ARGCOMPLETE_OK
"""The command `shardopt`: looks into checkpoints, compares, verifies and rewrites them, without a job."""

from shardopt.cli.entry import main as main
from shardopt.runtime.exports import offer as _offer

_offer(__name__)
