"""Refuses parameters that a torch optimizer cannot step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.registry import AlgorithmSpec, StepsOn, unknown
from shardopt.errors import AlgorithmError, Problem, StateError
from shardopt.optim.local.shards import Shards
from shardopt.sharding.gradients import is_added_up
from shardopt.sharding.view import view_of


def refuse_unfit(
    optimizer: Optimizer,
    spec: AlgorithmSpec | None,
    names: Mapping[Tensor, str],
    shards: Iterable[Shards],
    groups: Iterable[Mapping[str, Any]],
) -> None:
    """Raises if the algorithm cannot step the parameters.

    Args:
        optimizer: the inner one.
        spec: of its algorithm, if that is known.
        names: of the parameters that it is given → their FQNs.
        shards: of all sharded parameters, given now or before.
        groups: all that there are to be.

    Raises:
        AlgorithmError: the algorithm cannot step on one.
    """
    sharded = next(iter(shards), None)
    if spec is not None and spec.steps_on is StepsOn.PARAMETERS:
        _refuse_unsuitable(spec, names)
    elif sharded is not None and spec is None:
        raise AlgorithmError(
            "an unknown optimizer may not step on shards", [unknown(type(optimizer))], code="unknown-algorithm"
        )
    elif sharded is not None and spec is not None and not spec.elementwise:
        problem = Problem(
            key=sharded.name,
            found=f"a sharded parameter under {spec.name}: {spec.why_not or 'it is registered with elementwise=False'}",
            required="an algorithm that treats every element by itself, or plain parameters",
            remedy=f"give this parameter to another optimizer, or keep it whole on every rank for {spec.name}",
        )
        raise AlgorithmError(f"{spec.name} may not step on shards", [problem])
    if sharded is not None and any(group.get("differentiable") for group in groups):
        problem = Problem(
            key=sharded.name,
            found="a sharded parameter in a step with differentiable=True",
            required="plain parameters, as local tensors take no part in autograd",
            remedy="leave differentiable out, or keep the parameters whole",
        )
        raise AlgorithmError("a step on shards cannot be differentiated", [problem])


def refuse_global_name(taken: Collection[str], names: Mapping[Tensor, str]) -> None:
    """Raises if a parameter has the name under which the state of no parameter is saved.

    Args:
        taken: such names.
        names: parameter → FQN.

    Raises:
        AlgorithmError: there is one.
    """
    problems = [
        Problem(
            name, "a parameter of this name", "another one, as state of no parameter is saved under it", "rename it"
        )
        for name in names.values()
        if name in taken
    ]
    if problems:
        raise AlgorithmError("two kinds of state would be saved under one name", problems)


def _refuse_unsuitable(spec: AlgorithmSpec, names: Mapping[Tensor, str]) -> None:
    trained = {name: parameter for parameter, name in names.items() if is_added_up(parameter)}
    reasons = {name: spec.unsuitable(view_of(parameter, name)) for name, parameter in trained.items()}
    problems = [
        Problem(name, reason, f"a parameter that {spec.name} can step", "give it to another optimizer")
        for name, reason in reasons.items()
        if reason
    ]
    if problems:
        raise AlgorithmError(f"{spec.name} cannot step these parameters", problems)


def parameters_of(
    taken: list[Tensor],
    owners: Mapping[Tensor, Tensor],
    local_tensors: Mapping[Tensor, tuple[Tensor, ...]],
    names: Mapping[Tensor, str],
) -> list[Tensor]:
    """Returns the parameters of a group's local tensors, each once, in the group's order.

    Args:
        taken: the group's tensors.
        owners: local tensor → its parameter, of all that the factory was given.
        local_tensors: parameter → its local tensors.
        names: parameter → FQN, for errors.

    Raises:
        StateError: the group has others, or not all local tensors of a parameter.
    """
    strangers = [local for local in taken if local not in owners]
    if strangers:
        problem = Problem(
            key=f"a tensor of shape {tuple(strangers[0].shape)}",
            found="a tensor that the factory took from elsewhere",
            required="the tensors that the factory is given",
            remedy="let the factory build the optimizer over its argument",
        )
        raise StateError("the optimizer has tensors without a name", [problem], code="bad-parameters")
    here = set(taken)
    parameters = list(dict.fromkeys(owners[local] for local in taken))
    for parameter in parameters:
        if not here.issuperset(local_tensors[parameter]):
            problem = Problem(
                key=names[parameter],
                found="local shards in two groups",
                required="one group",
                remedy="let the factory put all shards of a parameter in one group",
            )
            raise StateError("a parameter is in two groups", [problem], code="bad-groups")
    return parameters
