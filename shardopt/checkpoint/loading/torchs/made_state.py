"""Makes the state of torch's optimizers to load into: what their first step would make, and places for what is stored.

Nothing says what entries an optimizer of a program's own has. So there is a place for each that is stored: of
parameters without state; of those whose constructor has made some of it; and under keys that are no parameters.

State of those within another library's optimizer by names (torchrec's wrappers) is made here too: its own `init_state`
is a step on zero gradients, which decays weights, and makes state of parameters that had none when they were saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shardopt.checkpoint.format.manifest import Manifest, StoredTensor
from shardopt.checkpoint.format.tensor_bytes import torch_dtype
from shardopt.checkpoint.loading.names import owner_of
from shardopt.checkpoint.loading.torchs.kept import STEP
from shardopt.errors import MismatchError, Problem
from shardopt.runtime.torch_private import lazy_state, makes_lazy_state_as_torch, steps_as_torch
from shardopt.sharding.view import local_tensors, view_of
from shardopt.state.param_groups import PARAMS, numbers_in, other_algorithm
from shardopt.state.paths import PARAM_GROUPS, STATE, Path, join, nest
from shardopt.state.state import FlatState, PartialStateful, RestoreTarget, Tied

_STEP_BEFORE = (
    "where there is a checkpoint to load (manager.steps()), take a step with rate 0 before: set 'lr' of each group to "
    "0 (fill_(0) if it is a tensor), run a forward and a backward that reaches every parameter, step, and call "
    "zero_grad(); the load puts rates and state back"
)
_CPU = torch.device("cpu")
_Place = tuple[int, int] | None
"""The storage of a local tensor, by its number while it lives, and where in it the tensor begins; None if unknown."""


@dataclass(frozen=True, slots=True)
class TorchsState:
    """Makes the state of one of torch's optimizers for a load, and removes it if the load fails.

    Args:
        parameters: by the names, or the numbers, under which their state is stored.
        stored: name → path within its state → what is stored there; also of names that are keys of the state, as of no
            parameter.
        strange: names of those whose state another algorithm has saved: they get only what their own has.
        saved_as: returns what `stored_dtypes` does.
    """

    optimizer: Optimizer
    parameters: Mapping[str, torch.Tensor]
    stored: Mapping[str, Mapping[Path, Any]]
    strange: Collection[str]
    saved_as: Callable[[], Mapping[_Place, torch.dtype]]

    @property
    def state(self) -> Any:
        """The state of the optimizer, by parameter."""
        return self.optimizer.state

    def init_state(self, *, names: Iterable[str]) -> None:
        """Makes the state of some parameters as a first step would, with places for further stored entries.

        Entries that are there stay.
        """
        groups = {id(parameter): group for group in self.optimizer.param_groups for parameter in group[PARAMS]}
        for name in names:
            key = self._key(name)
            parameter = self.parameters[name] if name in self.parameters else next(iter(self.parameters.values()))
            group, made = groups[id(parameter)], self.optimizer.state.get(key, {})
            if name in self.parameters and makes_lazy_state_as_torch(self.optimizer):
                made = {**lazy_state(self.optimizer, group, parameter), **made}
            numbers_go_along = bool(group.get("capturable") or group.get("fused"))
            devices = (parameter.device if numbers_go_along else _CPU, parameter.device)
            stored = {} if name in self.strange else self.stored[name]
            absent = {path: each for path, each in stored.items() if not path or path[0] not in made}
            has_tensors = any(isinstance(each, StoredTensor) for each in absent.values())
            cast = self._cast_of(parameter) if has_tensors and name in self.parameters else None
            places = nest({path: _place_for(path, each, parameter, cast, devices) for path, each in absent.items()})
            self.optimizer.state[key] = places if () in absent else {**made, **places}

    def drop_state(self, names: Iterable[str]) -> None:
        """Removes the state of some parameters."""
        for name in names:
            self.optimizer.state.pop(self._key(name), None)

    def _cast_of(self, parameter: torch.Tensor) -> torch.dtype | None:
        """Returns the dtype whose tensors, in the state of a parameter, get the parameter's; None for none.

        That is the one that the parameter was saved with. Only torch's own classes go to fewer digits, as they would
        make their state so; others may keep theirs in fp32 beside any parameter.
        """
        saved_as = self.saved_as().get(_place_of(parameter))
        if saved_as is None or not (saved_as.is_floating_point and parameter.is_floating_point()):
            return None
        return saved_as if _holds_all(parameter, saved_as) or steps_as_torch(self.optimizer) else None

    def _key(self, name: Any) -> Any:
        return self.parameters.get(name, name)

    def lacking(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns name → key in `state` of those, of these, whose state is there and lacks stored entries."""
        keys = {name: self._key(name) for name in names if name not in self.strange}
        return {
            name: key
            for name, key in keys.items()
            if isinstance(self.state.get(key), dict)
            and not {str(path[0]) for path in self.stored.get(name, {}) if path} <= {*map(str, self.state[key])}
        }


def torchs_state(
    target: RestoreTarget,
    keys: Iterable[str],
    manifest: Manifest,
    tied: Tied,
    saved_as: Callable[[], Mapping[_Place, torch.dtype]] = dict,
) -> TorchsState | None:
    """Returns the `TorchsState` for one of torch's optimizers with stored state; None for other objects.

    Args:
        keys: those of the optimizer in the checkpoint.
        saved_as: as of a `TorchsState`, of which state is made.
    """
    optimizer, numbered = target.object, target.numbered
    if not isinstance(optimizer, Optimizer) or hasattr(optimizer, "init_state"):
        return None
    if numbered is not None and not numbered.in_order:
        parameters = dict(zip(numbered.names, numbered.parameters, strict=True))
    else:
        positions = numbers_in(optimizer, target.state) if target.groups is None else None
        parameters = {str(number): each for number, each in enumerate(positions or ())}
    name_here = {tied.get(name, name): name for name in parameters}
    keys = [*keys]
    stored = stored_state(target, keys, manifest, name_here)
    strange = of_other_algorithms(target, manifest, tied)
    own = {name_here[name]: each for name, each in stored.items() if name in name_here}
    if numbered is not None and not numbered.in_order and not strange:
        own |= _of_no_parameter({name: each for name, each in stored.items() if name not in name_here}, target, keys)
    return TorchsState(optimizer, parameters, own, strange, saved_as)


def stored_dtypes(flat: FlatState, *manifests: Manifest) -> dict[_Place, torch.dtype]:
    """Returns where tensors of an app are in memory → their stored dtypes, of those that have others here.

    By memory, as the app may have the tensors of a state_dict, which are others than the parameters.
    """
    found: dict[_Place, torch.dtype] = {}
    for key, leaf in flat.leaves.items():
        stored = next((each.tensors[key] for each in manifests if key in each.tensors), None)
        if stored is not None and isinstance(leaf.value, torch.Tensor):
            dtype = torch_dtype(stored.dtype)
            if dtype != leaf.value.dtype and (place := _place_of(leaf.value)) is not None:
                found[place] = dtype
    return found


def _place_of(tensor: torch.Tensor) -> _Place:
    """Returns where a tensor's memory on this rank begins, also without elements."""
    here = () if is_lazy(tensor) else local_tensors(tensor)
    strided = (each for each in here if each.layout is torch.strided)
    return next(((id(each.untyped_storage()), int(each.storage_offset())) for each in strided), None)


def _of_no_parameter(
    stored: Mapping[str, dict[Path, Any]], target: RestoreTarget, keys: Iterable[str]
) -> dict[str, dict[Path, Any]]:
    """Returns the state, of this by names, that is under a key of the program's own: of no parameter in the groups."""
    prefix = f"{join((*target.path, PARAM_GROUPS))}."
    grouped = [key.removeprefix(prefix) for key in keys if stored and key.startswith(prefix)]
    first = {part for name in grouped for part in (name, name.partition(".")[0])}  # renamed keys are split at points
    return {name: each for name, each in stored.items() if first and name not in first}


def of_other_algorithms(
    target: RestoreTarget,
    manifest: Manifest,
    tied: Tied,
    other: Callable[[Mapping[str, Any], str], str] = other_algorithm,
) -> list[str]:
    """Returns the names of parameters, of one of torch's optimizers, that another algorithm has stepped.

    Args:
        other: says which, by stored options and the algorithm here.
    """
    numbered = target.numbered
    if numbered is None:
        return []
    stored = {name: manifest.values.get(target.options_key(name, tied), ((), None))[1] for name in numbered.names}
    return [
        name for name, options in stored.items() if isinstance(options, Mapping) and other(options, numbered.algorithm)
    ]


def refuse_lost_wrappers(key: str, optimizer: object, absent: Mapping[str, Mapping[Path, Any]]) -> None:
    """Raises MismatchError for state of torchao's optimizers, in parts that would come back as dicts.

    No step works with these. Tensors in 8 or 4 bits are stored in parts, which do not tell of what class the whole was.

    Args:
        key: of the state in the app.
        absent: name of a parameter → path within its state → what is stored there, of those without state here.
    """
    if not any(each.__module__.startswith("torchao.") for each in type(optimizer).__mro__):
        return
    for name, entries in absent.items():
        for path, stored in entries.items():
            if len(path) > 1 and isinstance(stored, StoredTensor):
                where, found = f"{key}.{name}.{path[0]}", f"parts of a tensor ({path[-1]}, …), and not its class"
                problem = Problem(where, found, "one that a step of this optimizer has made", _STEP_BEFORE)
                raise MismatchError("state of wrapper tensors cannot be made by a load", [problem])


def stored_state(
    target: RestoreTarget, keys: Iterable[str], manifest: Manifest, known: Collection[str]
) -> dict[str, dict[Path, Any]]:
    """Returns the stored state of an optimizer: name → path within → tensor or value.

    Args:
        known: names of parameters. Of a key that was renamed no path tells where the name ends.
    """
    at = len(target.path)
    prefix = f"{target.state_key}."
    found: dict[str, dict[Path, Any]] = {}
    for key in keys:
        each = manifest.tensors.get(key)
        path, value = (each.path, each) if each is not None else manifest.values.get(key, ((), None))
        if len(path) > at + 1 and path[at] == STATE:
            name, within = str(path[at + 1]), path[at + 2 :]
            owner, entry = ("", "") if name in known else owner_of(key.removeprefix(prefix), known)
            if owner:
                name, within = owner, tuple(entry.split(".")) if entry else ()
            entries: Mapping[Any, Any] = {within: value}
            if not within and isinstance(value, Mapping):  # without a tensor in it
                entries = {(entry,): inner for entry, inner in value.items()}
            found.setdefault(name, {}).update(entries)
        elif len(path) == at and isinstance(value, Mapping):  # plain values that the app has as one yet
            for name, entries in value.get(STATE, {}).items():
                found.setdefault(str(name), {}).update({(entry,): inner for entry, inner in entries.items()})
    return found


def _place_for(
    path: Path, stored: Any, parameter: torch.Tensor, cast: torch.dtype | None, devices: tuple[torch.device, ...]
) -> Any:
    """Returns a place for a stored entry of the state of a parameter.

    A number never loses digits.

    Args:
        path: of the entry within that state.
        cast: the dtype of stored entries that get that of the parameter.
        devices: of a number, and of a tensor of another shape than the parameter's.
    """
    if not isinstance(stored, StoredTensor):
        return copy.deepcopy(stored)
    shape, dtype, own_shape = stored.layout.shape, torch_dtype(stored.dtype), view_of(parameter, "a parameter").shape
    if dtype == cast and path[-1:] != (STEP,) and (shape or shape == own_shape or _holds_all(parameter, dtype)):
        dtype = parameter.dtype
    if shape == own_shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(shape, dtype=dtype, device=devices[bool(shape)])


def _holds_all(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.promote_types(dtype, parameter.dtype) == parameter.dtype


def torchs_within(
    target: RestoreTarget, keys: Iterable[str], manifest: Manifest, tied: Tied, saved_as: Callable[[], Any]
) -> list[TorchsState]:
    """Returns a `TorchsState` for each of torch's optimizers within an optimizer that has its parameters by name.

    Args:
        target, keys, manifest, tied, saved_as: as for `torchs_state`.
    """
    optimizer, params = target.object, getattr(target.object, "params", None)
    is_others = isinstance(optimizer, Optimizer) and not isinstance(optimizer, PartialStateful)
    if not is_others or not isinstance(params, Mapping):
        return []
    names = {id(parameter): name for name, parameter in params.items()}
    stored = stored_state(target, keys, manifest, {tied.get(name, name): name for name in params})
    found = []
    for inner in _innermost(optimizer):
        parameters = [each for group in inner.param_groups for each in group[PARAMS] if id(each) in names]
        own = {names[id(each)]: each for each in parameters}
        saved = {name: stored[tied.get(name, name)] for name in own if tied.get(name, name) in stored}
        found.append(TorchsState(inner, own, saved, (), saved_as))
    return found


def _innermost(node: Any, above: tuple[Any, ...] = ()) -> Iterator[Optimizer]:
    """Yields the optimizers in an optimizer's attributes, and in theirs, that are around no other.

    Args:
        above: those around this one, which it may know.
    """
    if not isinstance(node, Optimizer):
        for each in node if isinstance(node, list | tuple) else ():
            yield from _innermost(each, above)
        return
    if any(each is node for each in above):
        return
    values = [value for name, value in vars(node).items() if name != "param_groups"]
    within = [each for value in values for each in _innermost(value, (*above, node))]
    if within or hasattr(node, "init_state"):
        yield from within
    else:
        yield node
