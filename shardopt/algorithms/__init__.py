"""The registry of optimization algorithms: the state that each keeps, and whether it may step on shards."""

from shardopt.algorithms import builtin as _builtin  # noqa: F401  # registers them
from shardopt.algorithms.communicating import CommunicatingOptimizer as CommunicatingOptimizer
from shardopt.algorithms.communicating import ParameterStep as ParameterStep
from shardopt.algorithms.registry import AlgorithmSpec as AlgorithmSpec
from shardopt.algorithms.registry import AtFirstStep as AtFirstStep
from shardopt.algorithms.registry import Dtype as Dtype
from shardopt.algorithms.registry import Kind as Kind
from shardopt.algorithms.registry import MakesState as MakesState
from shardopt.algorithms.registry import StateEntry as StateEntry
from shardopt.algorithms.registry import StepsOn as StepsOn
from shardopt.algorithms.registry import algorithms as algorithms
from shardopt.algorithms.registry import register as register
from shardopt.algorithms.registry import spec_of as spec_of
from shardopt.runtime.exports import offer as _offer

_offer(__name__)
