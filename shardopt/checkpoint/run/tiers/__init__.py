"""Tiers of a run: directories of each host that are faster than its root."""

from shardopt.checkpoint.run.tiers.tier import Tier

__all__ = ["Tier"]
