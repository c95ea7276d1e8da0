"""The position of a run in its data: samplers that resume, mixtures of them, and random states."""

from shardopt.data.mixture import MixtureSampler as MixtureSampler
from shardopt.data.random_state import PerRankState as PerRankState
from shardopt.data.random_state import RandomState as RandomState
from shardopt.data.sampler import ResumableSampler as ResumableSampler
from shardopt.data.workers import shield_workers as shield_workers
from shardopt.runtime.exports import offer as _offer

_offer(__name__)
