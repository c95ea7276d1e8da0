"""Rearranging: loads the tensors of a checkpoint into an app that lays them out differently."""

from shardopt.checkpoint.rearrange.reader import rearranged as rearranged
from shardopt.checkpoint.rearrange.rules import AnyRule as AnyRule
from shardopt.checkpoint.rearrange.rules import Drop as Drop
from shardopt.checkpoint.rearrange.rules import Rule as Rule
from shardopt.checkpoint.rearrange.rules import Tie as Tie
from shardopt.checkpoint.rearrange.rules import inverse as inverse
from shardopt.runtime.exports import offer as _offer

_offer(__name__)
