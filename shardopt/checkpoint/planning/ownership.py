"""The checks that optimizers step the parameters of the models beside them, and that these are saved for each island.

An optimizer that is made too early steps tensors that nobody uses; one of islands has weights that differ between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from shardopt.errors import Problem, StateError
from shardopt.names import plain_name
from shardopt.state import FlatState, RestoreTarget, join

_REMEDY = (
    "make the optimizer last: first the model in the form in which it trains (fully_shard(model), or model = Model()), "
    "then keyed(..., model.named_parameters()). If these are another model's, add that to the app"
)


def refuse_strange_parameters(flat: FlatState) -> None:
    """Refuses an optimizer of parameters that no module of the app has, where a module has others in their place.

    That happens where `keyed(...)` comes before `fully_shard(model)`, or where the model was made anew: steps run, and
    the model never changes. A parameter is in the place of another that has the same name, shape, dtype and kind of
    device; one on the meta device in that of any with its name and shape; and where the optimizer steps others of the
    module itself, one in that of another shape (tables of tokens are made larger). Optimizers that know no names are
    compared as a whole. An optimizer whose model is not in the app passes.

    Raises:
        StateError: names each such optimizer, and a parameter.
    """
    optimizers = [each for each in flat.targets if isinstance(each.object, Optimizer)]
    modules = {join(each.path): _parameters_of(each) for each in flat.targets if isinstance(each.object, Module)}
    if not (optimizers and modules):
        return
    owned = {id(tensor) for parameters in modules.values() for tensor in parameters.values()}
    problems = []
    for target in optimizers:
        for optimizer in _children_of(target.object):
            problem = _strange(join(target.path), optimizer, modules, owned)
            if problem is not None:
                problems.append(problem)
    if problems:
        raise StateError("an optimizer steps tensors that are no parameters of the model", problems)


def refuse_unshared(flat: FlatState) -> None:
    """Refuses parameters under a key that all ranks share, while ranks have values of their own by intent.

    An optimizer whose `unshared_tensors()` has any now says so, and under which parts of a path they belong. That
    replicas have drifted apart is found without this, but by samples; where few rows have changed these may miss it.

    Raises:
        StateError: names each such key.
    """
    problems = []
    for target in flat.targets:
        unshared = getattr(target.object, "unshared_tensors", None)
        if not isinstance(target.object, Optimizer) or unshared is None:
            continue
        places = {id(tensor): place for place, tensors in unshared() for tensor in tensors}
        for key, leaf in flat.leaves.items() if places else ():
            place = places.get(id(leaf.value), ())
            if place and not any(leaf.path[start : start + len(place)] == place for start in range(len(leaf.path))):
                found = "a parameter that has other values on other islands, under a key that they share"
                remedy = 'put the model there by {**optimizer.own({"model": model})}, or save where islands have met'
                problems.append(Problem(key, found, f"a key with {join(place)!r} in it", remedy))
    if problems:
        raise StateError("values of several islands cannot be saved as one", problems)


def _strange(
    key: str, optimizer: Optimizer, modules: Mapping[str, Mapping[str, Tensor]], owned: set[int]
) -> Problem | None:
    named = _names_of(optimizer)
    if named is None:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if any(id(tensor) in owned for tensor in tensors):
            return None
        kinds = Counter(map(_kind, tensors))
        module = next((each for each, own in modules.items() if Counter(map(_kind, set(own.values()))) == kinds), None)
        if module is None:
            return None
        count = len(tensors)
        foreign = f"{count} parameters that no module of the app has, while {module!r} has as many of their shapes"
        return Problem(key, foreign, "the model's own parameters", _REMEDY)
    stepped = {
        module for module, own in modules.items() if any(own.get(name) is tensor for name, tensor in named.items())
    }
    strange = {
        name: module
        for name, tensor in named.items()
        if id(tensor) not in owned
        for module, own in modules.items()
        if name in own and _replaces(own[name], tensor, module in stepped)
    }
    if not strange:
        return None
    name, module = next(iter(strange.items()))
    foreign = (
        f"{len(strange)} parameters that no module of the app has, such as {name!r}, while {module!r} has another one"
    )
    return Problem(key, foreign, "the model's own parameters", _REMEDY)


def _parameters_of(target: RestoreTarget) -> dict[str, Tensor]:
    """Returns plain name → parameter of a module."""
    assert isinstance(target.object, Module)
    parameters: dict[str, Tensor] = {name: each for name, each in target.state.items() if isinstance(each, Parameter)}
    if not parameters:  # its state is of tensors over their memory
        parameters = dict(target.object.named_parameters(remove_duplicate=False))
    plain = target.plain_names
    return {plain.get(name, plain_name(name)): parameter for name, parameter in parameters.items()}


def _children_of(optimizer: Any) -> Iterator[Optimizer]:
    """Yields an optimizer, or those that it combines, each of which has the names that its model has.

    But none of those that say they step tensors of their own, which have the names of the model's all the same.
    """
    if getattr(optimizer, "steps_own_tensors", False):
        return
    children = getattr(optimizer, "optimizers", None)
    if isinstance(children, list) and children and all(isinstance(each, tuple) and len(each) == 2 for each in children):
        for _, child in children:
            yield from _children_of(child)
    else:
        yield optimizer


def _names_of(optimizer: Any) -> Mapping[str, Tensor] | None:
    """Returns parameters by name, of a keyed optimizer or of torch's over named parameters; None of others."""
    params = getattr(optimizer, "params", None)
    if isinstance(params, Mapping):
        return params
    groups = optimizer.param_groups
    if not all("param_names" in group for group in groups):
        return None
    return {
        plain_name(name): tensor
        for group in groups
        for name, tensor in zip(group["param_names"], group["params"], strict=True)
    }


def _replaces(own: Tensor, tensor: Tensor, steps_others: bool) -> bool:
    """Whether a module's parameter has come in the place of an optimizer's that has the same name.

    Args:
        steps_others: whether the optimizer steps other parameters of the module itself.
    """
    if own.shape != tensor.shape:
        return steps_others
    return tensor.is_meta or _kind(own) == _kind(tensor)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.dtype, tensor.device.type)
