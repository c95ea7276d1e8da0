"""Rearranging: the tensors of a checkpoint loaded as those of an app that lays them out in another way."""

from shardopt.checkpoint.rearrange.reader import rearranged
from shardopt.checkpoint.rearrange.rules import AnyRule, Drop, Rule, Tie, inverse

__all__ = ["AnyRule", "Drop", "Rule", "Tie", "inverse", "rearranged"]
