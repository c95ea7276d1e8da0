"""Tiers of a run: directories of each host that are faster than its root."""

from shardopt.checkpoint.run.destinations import Tier as Tier
from shardopt.runtime.exports import offer as _offer

_offer(__name__)
