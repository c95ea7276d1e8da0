"""The registry of optimization algorithms: the state that each keeps, and which of them may step on shards."""

from shardopt.algorithms import builtin as _builtin  # noqa: F401  # registers them
from shardopt.algorithms.communicating import CommunicatingOptimizer, ParameterStep
from shardopt.algorithms.registry import (
    AlgorithmSpec,
    AtFirstStep,
    Dtype,
    Kind,
    MakesState,
    StateEntry,
    StepsOn,
    algorithms,
    register,
    spec_of,
)

__all__ = [
    "AlgorithmSpec",
    "AtFirstStep",
    "CommunicatingOptimizer",
    "Dtype",
    "Kind",
    "MakesState",
    "ParameterStep",
    "StateEntry",
    "StepsOn",
    "algorithms",
    "register",
    "spec_of",
]
