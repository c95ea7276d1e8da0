"""Checks an app's tensors by its optimizers and modules: which are stepped, and which may differ between ranks.

An optimizer that is made too early steps tensors that nobody uses; one of islands has weights that differ between them.
Buffers, such as running statistics, may have other values on each rank: batch norm under data parallelism counts what
that rank has seen. As where a model is broadcast, the first rank that holds a buffer speaks for all. Parameters and the
state of optimizers are never buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast
from weakref import ProxyTypes

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shardopt.checkpoint.format.tensor_bytes import address_of
from shardopt.errors import Problem, StateError
from shardopt.runtime.partial_loads import is_partly_loaded, refuse_partly_loaded
from shardopt.sharding.gradients import is_moved_by_backward
from shardopt.sharding.pieces import View
from shardopt.sharding.swapped import refuse_swapped
from shardopt.sharding.view import addresses_of, local_tensors
from shardopt.state.names import plain_name
from shardopt.state.paths import STATE, Path, join, keys_below
from shardopt.state.state import FlatState, RestoreTarget

_SAVE_IN_SWAP = "a checkpoint of a training would have averages in the place of weights"
_REMEDY = (
    "make the optimizer last: first the model in the form in which it trains (fully_shard(model), or model = Model()), "
    "then keyed(..., model.named_parameters()). If these are another model's, put that module itself into the app"
)


_IN_BACKWARD = (
    "have backward step these tables: apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {...}) "
    "before DistributedModelParallel, whose fused_optimizer goes into the app; or plan them data_parallel"
)


def check_optimizers(flat: FlatState) -> None:
    """Checks that optimizers step the parameters of the models beside them, and that ranks may share what is saved.

    An optimizer of parameters that no module of the app has, where a module has others in their place, is refused. That
    happens where `keyed(...)` comes before `fully_shard(model)`, or where the model was made again: steps run, and the
    model never changes. An optimizer whose model is not in the app passes.

    So are parameters under a key that all ranks share, while ranks have values of their own by intent
    (`unshared_tensors()`). That replicas have drifted apart is found without this, but by samples; where few rows have
    changed these may miss it.

    An optimizer by names whose parameters have changed places in the model, as where layers are put in another order,
    would save their state under each other's names, and a resume would give it to the wrong ones.

    So is state of a plain parameter that is this rank's part of a sharded tensor, as torchrec's DENSE kernel gives: it
    would be taken for that of the whole.

    Averages in the place of stepped parameters (`EMA.swap`) would be trained after a resume. A model without its
    optimizer may be saved so.

    Raises:
        StateError: names each such optimizer, and a parameter; or each such key; or a parameter with averages.
        PartialLoadError: an optimizer of which something is saved may be half changed.
    """
    optimizers = [each for each in flat.targets if isinstance(each.object, Optimizer)]
    half_changed = [each for each in optimizers if is_partly_loaded(cast(Optimizer, each.object))]
    if half_changed:
        saved = keys_below({key: leaf.path for key, leaf in flat.leaves.items()}, [each.path for each in half_changed])
        refuse_partly_loaded(
            (join(each.path), cast(Optimizer, each.object)) for each in half_changed if saved[each.path]
        )
    modules = [each for each in flat.targets if isinstance(each.object, Module)] if optimizers else []
    owned: dict[int, str] = {}  # parameters, and their plain names; "" for one that has several
    for module in modules:
        for part, tensor in module.state.items():
            if isinstance(tensor, Parameter):
                name = module.plain_names.get(part, part)
                owned[id(tensor)] = name if owned.get(id(tensor), name) == name else ""
    places: dict[int, tuple[str, ...]] = {}
    strange = []
    named: list[tuple[Path, Mapping[str, Tensor]]] = []  # the parameters of keyed optimizers
    for each in optimizers:
        optimizer: Any = each.object
        params = (getattr(child, "params", None) for child in children_of(optimizer))
        named += [(each.path, own) for own in params if isinstance(own, Mapping)]
        if hasattr(optimizer, "unshared_tensors"):
            places |= {id(tensor): place for place, own in optimizer.unshared_tensors() for tensor in own}
        stepped = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        refuse_swapped(_SAVE_IN_SWAP, stepped)
        if modules and not owned.keys() >= set(map(id, stepped)):
            strange.append(each)
    if strange or any(owned.get(id(tensor)) != name for _, own in named for name, tensor in own.items()):
        parameters = {join(each.path): _parameters_of(each) for each in modules}
        if strange:
            _refuse_parts(strange, modules)
            _refuse_strange(strange, parameters, {join(each.path): _buffers_in(each) for each in modules}, flat)
        _refuse_moved(named, parameters)
    if places:
        _refuse_unshared(flat, places)


def _held_by_app(flat: FlatState) -> set[int]:
    """Returns the ids of the tensors that the app has in dicts and lists of its own, and in networks of its objects.

    What an object's state has besides may be what it has kept of an old model.
    """
    objects = {each.path: each.object for each in flat.targets if not isinstance(each.object, Module | Optimizer)}
    paths, networks = {each.path for each in flat.targets}, dict[Path, dict[Any, int]]()
    held = set()
    for leaf in flat.leaves.values():
        above = [leaf.path[:length] for length in range(1, len(leaf.path) + 1)]
        place = next((each for each in above if each in paths), None)
        if place in objects and place not in networks:
            networks[place] = {_memory(each): id(each) for each in _parameters_within(objects[place])}
        if place is None:
            held.add(id(leaf.value))
        elif place in networks and isinstance(leaf.value, Tensor):  # a state_dict() has others over their memory
            held.add(networks[place].get(_memory(leaf.value), 0))
    return held


def _refuse_unshared(flat: FlatState, places: Mapping[int, tuple[str, ...]]) -> None:
    """Raises StateError for rank-specific tensors that are not under their part of the path."""
    problems = []
    for key, leaf in flat.leaves.items():
        place = places.get(id(leaf.value), ())
        if place and not any(leaf.path[start : start + len(place)] == place for start in range(len(leaf.path))):
            found = "a parameter that has other values on other islands, under a key that they share"
            remedy = 'put the model there by {**optimizer.own({"model": model})}, or save where islands have met'
            problems.append(Problem(key, found, f"a key with {join(place)!r} in it", remedy))
    if problems:
        raise StateError("values of several islands cannot be saved as one", problems, code="semi-sync")


def _refuse_strange(
    optimizers: Sequence[RestoreTarget],
    modules: Mapping[str, Mapping[str, Tensor]],
    buffers: Mapping[str, Collection[str]],
    flat: FlatState,
) -> None:
    """Raises StateError for optimizers of parameters that a module has replaced by others, and the app has not.

    A parameter is in the place of another that has the same name, shape, dtype and kind of device; one on the meta
    device in that of any with its name and shape; and where the optimizer steps others of the module itself, one in
    that of another shape (tables of tokens are made larger), or of a buffer. Optimizers that know no names are compared
    as a whole, and views of tables by their memory.

    Args:
        buffers: key of each module → the names of its buffers.
    """
    parameters = [tensor for own in modules.values() for tensor in own.values()]
    saved = {id(each): key for key, each in flat.tensors().items()}
    owned = _held_by_app(flat).union(map(id, parameters))
    groups = (group for each in optimizers for group in cast(Optimizer, each.object).param_groups)
    if views := [tensor for group in groups for tensor in group["params"] if is_moved_by_backward(tensor)]:
        addresses = {0, *addresses_of(parameters)}
        owned.update(id(view) for view in views if not addresses.isdisjoint(addresses_of([view])))
    each_with_path = [(each.path, child) for each in optimizers for child in children_of(each.object)]
    problems = [_strange(join(path), optimizer, modules, buffers, owned, saved) for path, optimizer in each_with_path]
    if any(problems):
        raise StateError(
            "an optimizer steps tensors that are no parameters of the model",
            [each for each in problems if each],
            code="stale-parameters",
        )


def _refuse_parts(optimizers: Sequence[RestoreTarget], modules: Sequence[RestoreTarget]) -> None:
    """Raises StateError for state of plain parameters that are this rank's part of a module's sharded tensor."""
    whole: dict[Any, torch.Size] = {}
    for tensor in (each for module in modules for each in module.state.values() if isinstance(each, Tensor)):
        whole |= {_place(each): tensor.shape for each in _locals(tensor) if each.shape != tensor.shape}
    problems = []
    for target, child in ((each, child) for each in optimizers if whole for child in children_of(each.object)):
        tensors = [each for group in child.param_groups for each in group["params"]]
        named = names_of(child) or {str(number): each for number, each in enumerate(tensors)}
        for name, tensor in named.items():
            shape = whole.get(_memory(tensor))
            if shape is not None and _locals(tensor)[0].shape == tensor.shape != shape and child.state.get(tensor):
                found = f"state of {[*tensor.shape]}, as this rank's part of {[*shape]} is a parameter by itself"
                key = join((*target.path, STATE, name))
                problems.append(Problem(key, found, "state that says of which rows it is", _IN_BACKWARD))
    if problems:
        raise StateError("an optimizer steps this rank's part of a tensor", problems, code="cannot-store")


def _strange(
    key: str,
    optimizer: Optimizer,
    modules: Mapping[str, Mapping[str, Tensor]],
    buffers: Mapping[str, Collection[str]],
    owned: set[int],
    saved: Mapping[int, str],
) -> Problem | None:
    named = names_of(optimizer)
    if named is None:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        if any(id(tensor) in owned for tensor in tensors):
            return None
        kinds = Counter(map(_kind, tensors))
        module = next((each for each, own in modules.items() if Counter(map(_kind, set(own.values()))) == kinds), None)
        if module is None:
            return None
        place = next((f" ({saved[id(each)]} is one)" for each in tensors if id(each) in saved), "")
        foreign = f"{len(tensors)} parameters that no module of the app has{place}, while {module!r} has as many"
        return Problem(key, f"{foreign} of their shapes", "the model's own parameters", _REMEDY)
    stepped = {
        module for module, own in modules.items() if any(own.get(name) is tensor for name, tensor in named.items())
    }
    strange = {
        name: module
        for name, tensor in named.items()
        if id(tensor) not in owned
        for module, own in modules.items()
        if (name in own and _replaces(own[name], tensor, module in stepped))
        or (module in stepped and name in buffers[module])
    }
    if not strange:
        return None
    name, module = next(iter(strange.items()))
    place = f" ({saved[id(named[name])]})" if id(named[name]) in saved else ""
    foreign = (
        f"{len(strange)} parameters that no module of the app has, such as {name!r}{place}, while {module!r} has "
        "another one"
    )
    return Problem(key, foreign, "the model's own parameters", _REMEDY)


def _refuse_moved(
    optimizers: Sequence[tuple[Path, Mapping[str, Tensor]]], modules: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Raises StateError for keyed optimizers whose parameters have changed places in a module among themselves.

    Names that are meant otherwise, as of a slice of a ModuleList, which begin at 0 again, are those of others, too.
    """
    problems = []
    for path, named in optimizers:
        for module, own in modules.items():
            moved = [name for name, tensor in named.items() if own.get(name, tensor) is not tensor]
            if moved and {id(named[name]) for name in moved} == {id(own[name]) for name in moved}:
                found = f"{len(moved)} parameters, such as {moved[0]!r}, that {module!r} now has under other names"
                remedy = "make the optimizer again after layers change places, or use torch's, which has no names"
                problems.append(Problem(join(path), found, "the names that they had when it was made", remedy))
    if problems:
        raise StateError("parameters have changed places in the model", problems, code="stale-parameters")


def _parameters_of(target: RestoreTarget) -> dict[str, Tensor]:
    """Returns the parameters of a module by plain name."""
    assert isinstance(target.object, Module)
    parameters: dict[str, Tensor] = {name: each for name, each in target.state.items() if isinstance(each, Parameter)}
    if not parameters:  # its state is of tensors over their memory
        parameters = dict(target.object.named_parameters(remove_duplicate=False))
    plain = target.plain_names
    return {plain.get(name, plain_name(name)): parameter for name, parameter in parameters.items()}


def _buffers_in(target: RestoreTarget) -> set[str]:
    """Returns the plain names of the buffers that a module saves."""
    assert isinstance(target.object, Module)
    plain, buffers = target.plain_names, target.object.named_buffers(remove_duplicate=False)
    return {plain.get(name, plain_name(name)) for name, _ in buffers if name in target.state}


def children_of(optimizer: Any) -> Iterator[Optimizer]:
    """Yields an optimizer, or the optimizers that it combines, each with the names of its own model.

    But none of those that say they step tensors of their own, which have the names of the model's all the same.
    """
    if getattr(optimizer, "steps_own_tensors", False):
        return
    children = getattr(optimizer, "optimizers", None)
    if isinstance(children, list) and children and all(isinstance(each, tuple) and len(each) == 2 for each in children):
        for _, child in children:
            yield from children_of(child)
    else:
        yield optimizer


def names_of(optimizer: Any) -> Mapping[str, Tensor] | None:
    """Returns the parameters of a keyed optimizer, or of torch's over named parameters, by name; None for others."""
    params = getattr(optimizer, "params", None)
    if isinstance(params, Mapping):
        return params
    groups = optimizer.param_groups
    if not all("param_names" in group and len(group["param_names"]) == len(group["params"]) for group in groups):
        return None
    return {
        plain_name(name): tensor
        for group in groups
        for name, tensor in zip(group["param_names"], group["params"], strict=True)
    }


def _replaces(own: Tensor, tensor: Tensor, steps_others: bool) -> bool:
    """Whether a module's parameter has replaced an optimizer's parameter of the same name.

    Args:
        steps_others: whether the optimizer steps other parameters of the module itself.
    """
    if own.shape != tensor.shape:
        return steps_others
    return tensor.is_meta or _kind(own) == _kind(tensor)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.dtype, tensor.device.type)


def buffers_in(flat: FlatState, views: Mapping[str, View]) -> frozenset[str]:
    """Returns the keys of tensors in the memory of a module's buffer, or of an average of one.

    Modules are those of the app, and those that other objects of the app have as attributes.

    Args:
        views: of this rank's tensors.
    """
    memory = {_place(local) for each in flat.targets for local in _buffers_of(each.object, each.state)}
    if not memory:
        return frozenset()
    return frozenset(key for key, view in views.items() if any(_place(piece.tensor) in memory for piece in view.pieces))


def _buffers_of(target: object, state: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the local tensors in an object's state that may differ between ranks."""
    averages = getattr(target, "averages_of_buffers", None)
    if isinstance(target, Optimizer) or all(isinstance(each, Parameter) for each in state.values()):
        return
    if averages is not None:
        yield from averages()
        return
    for module in [target] if isinstance(target, Module) else _modules_within(target):
        owned = {_place(local) for each in module.parameters() for local in local_tensors(each)}
        for buffer in module.buffers():
            yield from (local for local in local_tensors(buffer) if address_of(local) and _place(local) not in owned)


def _parameters_within(target: object) -> Iterator[Tensor]:
    """Yields the parameters that an object has as attributes, and those of its modules."""
    own = [each for each in [*getattr(target, "__dict__", {}).values()] if type(each) not in ProxyTypes]
    yield from (each for each in own if isinstance(each, Parameter))
    for module in _modules_within(target):
        yield from module.parameters()


def _modules_within(target: object) -> Iterator[Module]:
    """Yields the modules in an object's attributes, and in lists and dicts whose first item is one."""
    for value in [*getattr(target, "__dict__", {}).values()]:  # at once, as a thread may add some
        with suppress(ReferenceError):  # a weak proxy of what is gone
            is_listed = isinstance(value, list | tuple)
            values = value.values() if isinstance(value, dict) else value if is_listed else (value,)
            if isinstance(next(iter(values), None), Module):
                yield from (each for each in values if isinstance(each, Module))


def places_of(tensor: Tensor) -> list[tuple[torch.device, int]]:
    """Returns where the elements of a tensor begin in memory; nothing of one without a place, such as a sparse one."""
    return [_place(each) for each in _locals(tensor) if address_of(each)]


def _memory(tensor: Tensor) -> Any:
    """Returns where a tensor's memory on this rank begins, also without elements; its number where it has none."""
    # Of a shard without elements by its storage, which a detached one has too, and whose number is the same for life.
    storages = ((id(each.untyped_storage()), int(each.storage_offset())) for each in _locals(tensor))
    return next(iter(places_of(tensor)), None) or next(storages, id(tensor))


def _locals(tensor: Tensor) -> list[Tensor]:
    return [] if is_lazy(tensor) or tensor.layout is not torch.strided else [*local_tensors(tensor)]


def _place(local: Tensor) -> tuple[torch.device, int]:
    return local.device, address_of(local)
