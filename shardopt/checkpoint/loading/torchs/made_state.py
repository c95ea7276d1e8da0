"""Makes the state of torch's optimizers to load into: what their first step would make, and places for what is stored.

Nothing says what entries an optimizer of a program's own has. So there is a place for each that is stored: of
parameters without state; of those whose constructor has made some of it; and under keys that are no parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shardopt.checkpoint.format.manifest import Manifest, StoredTensor
from shardopt.checkpoint.format.tensor_bytes import address_of, torch_dtype
from shardopt.checkpoint.loading.names import owner_of
from shardopt.checkpoint.loading.torchs.kept_dtypes import STEP
from shardopt.runtime.torch_private import lazy_state, makes_lazy_state_as_torch
from shardopt.sharding.view import local_tensors, view_of
from shardopt.state.param_groups import PARAMS, numbers_in, other_algorithm
from shardopt.state.paths import PARAM_GROUPS, STATE, Path, join, nest
from shardopt.state.state import FlatState, RestoreTarget, Tied

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TorchsState:
    """Makes the state of one of torch's optimizers for a load, and removes it if the load fails.

    Args:
        parameters: by the names, or the numbers, under which their state is stored.
        stored: name → path within its state → what is stored there; also of names that are keys of the state, as of no
            parameter.
        strange: names of those whose state another algorithm has saved: they get only what their own has.
        dtypes: memory of a parameter → the dtype with which it is stored itself, of those for which that is known.
    """

    optimizer: Optimizer
    parameters: Mapping[str, torch.Tensor]
    stored: Mapping[str, Mapping[Path, Any]]
    strange: Collection[str]
    dtypes: Mapping[int, torch.dtype]

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
            saved_as = self.dtypes.get(_memory_of(parameter)) if name in self.parameters else None
            places = nest({path: _place_for(path, each, parameter, saved_as, devices) for path, each in absent.items()})
            self.optimizer.state[key] = places if () in absent else {**made, **places}

    def drop_state(self, names: Iterable[str]) -> None:
        """Removes the state of some parameters."""
        for name in names:
            self.optimizer.state.pop(self._key(name), None)

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
    target: RestoreTarget, keys: Iterable[str], manifest: Manifest, flat: FlatState, whole: Manifest | None = None
) -> TorchsState | None:
    """Returns the `TorchsState` for one of torch's optimizers with stored state; None for other objects.

    Args:
        keys: those of the optimizer in the checkpoint.
        whole: also with the parameters, where a load of their state alone is without them.
    """
    optimizer, numbered, tied = target.object, target.numbered, flat.tied
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
    # By memory: the app may have the tensors of a state_dict, which are others than the parameters.
    here = {key: _memory_of(leaf.value) for key, leaf in flat.leaves.items() if isinstance(leaf.value, torch.Tensor)}
    known = [manifest.tensors] if whole is None else [manifest.tensors, whole.tensors]
    saved = {each: tensors[key] for key, each in here.items() for tensors in reversed(known) if key in tensors}
    dtypes = {each: torch_dtype(stored.dtype) for each, stored in saved.items()}
    return TorchsState(optimizer, parameters, own, strange, dtypes)


def _memory_of(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's memory on this rank, or its own number where it has none."""
    here = () if is_lazy(tensor) else local_tensors(tensor)
    return next(filter(None, map(address_of, here)), id(tensor))


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
    numbered, section = target.numbered, (*target.path, PARAM_GROUPS)
    if numbered is None:
        return []
    keys = {name: join((*section, tied.get(name, name))) for name in numbered.names}
    stored = {name: manifest.values.get(key, ((), None))[1] for name, key in keys.items()}
    return [
        name for name, options in stored.items() if isinstance(options, Mapping) and other(options, numbered.algorithm)
    ]


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
    path: Path, stored: Any, parameter: torch.Tensor, saved_as: torch.dtype | None, devices: tuple[torch.device, ...]
) -> Any:
    """Returns a place for a stored entry of the state of a parameter.

    A tensor that has the dtype of its parameter where it was saved has so here. But a number never loses digits.

    Args:
        path: of the entry within that state.
        saved_as: the stored dtype of the parameter; None if it is not known.
        devices: of a number, and of a tensor of another shape than the parameter's.
    """
    if not isinstance(stored, StoredTensor):
        return copy.deepcopy(stored)
    shape, dtype, own_shape = stored.layout.shape, torch_dtype(stored.dtype), view_of(parameter, "a parameter").shape
    if dtype == saved_as and dtype.is_floating_point and parameter.is_floating_point() and path[-1:] != (STEP,):
        holds_all = torch.promote_types(dtype, parameter.dtype) == parameter.dtype
        dtype = parameter.dtype if shape or not own_shape or holds_all else dtype
    if shape == own_shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(shape, dtype=dtype, device=devices[bool(shape)])
