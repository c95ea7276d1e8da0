"""Names of parameters and buffers, without the parts that wrappers add.

As torch's own checkpoints have it: state is for the parameter, however its module will be wrapped the next time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from typing import Any

from torch import Tensor
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

from shardopt.errors import Problem, StateError
from shardopt.runtime.torch_gradients import named_shards_of
from shardopt.state.paths import Path, join

_WRAPPERS = re.compile(r"(?<![^.])(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")
_DDP = "module."
"""The attribute of DistributedDataParallel and DataParallel; a user's own module may have the same name."""
_ANY_DDP = re.compile(r"(?<![^.])module\.")
LEAST_ID = 1 << 20  # of an object: none has its memory below
NAMELESS = "?"
"""Begins the names of parameters that the app does not have."""
_MOST_SPARE = 4  # "module" in one name that may be DistributedDataParallel's


def plain_name(name: str) -> str:
    """Strips the parts that activation checkpointing, torch.compile and FullyShardedDataParallel add to a name."""
    return _WRAPPERS.sub("", name)


def before_all(names: Collection[str]) -> str:
    """Returns the prefix that DistributedDataParallel may have added: as many "module." as all names have.

    Names do not tell whether it did, or a module of a model is called so; so a model has the same names in both cases.
    """
    before = ""
    while names and all(name.startswith(f"{before}{_DDP}") for name in names):
        before += _DDP
    return before


def may_have_wrappers(names: Collection[str]) -> bool:
    """Whether names may contain wrappers' parts; a quick check for thousands of names."""
    together = "\n".join(names)
    return _DDP in together or "_orig_mod." in together  # all but the latter end with the former


def plain_names_in(module: Module, names: Collection[str]) -> Mapping[str, str]:
    """Maps names in a module's state to plain names, if they differ.

    It also strips the "module." of DistributedDataParallel and DataParallel, which only the types of modules can tell
    from a module's own name.
    """
    if not may_have_wrappers(names):
        return {}
    replicated = [
        f"{path}.{_DDP}" if path else _DDP
        for path, each in module.named_modules(remove_duplicate=False)
        if isinstance(each, DistributedDataParallel | DataParallel)
    ]
    replicated.sort(key=len, reverse=True)  # inner ones first: what stands before them stays as it is
    plain = {}
    for name in names:
        short = name
        for prefix in replicated:
            if short.startswith(prefix):
                short = prefix.removesuffix(_DDP) + short.removeprefix(prefix)
        short = plain_name(short)
        if short != name:
            plain[name] = short
    return plain


def names_under_wrappers(
    stored: Collection[str], own: Collection[str], plain: Collection[str] = frozenset()
) -> dict[str, str]:
    """Maps names stored with wrappers' parts to a module's current names, as far as they fit.

    Where a "module." in a stored name is from cannot be seen any more: it is left out if all names that go on where it
    stands do so with it, as those of DistributedDataParallel do. A name that is stored too, or that two would get, is
    given to none.

    Args:
        stored: all names of one module, as they were stored.
        own: all names that it has, plain.
        plain: those stored names whose "module." is no wrapper's, as the save has left these out.
    """
    strange = [name for name in stored if name not in own]
    if not may_have_wrappers(strange):
        return {}
    following: dict[str, set[str]] = {}
    for name in map(plain_name, stored):
        segments = name.split(".")
        for i, segment in enumerate(segments):
            following.setdefault(".".join(segments[:i]), set()).add(segment)
    matches: dict[str, list[str]] = {}
    for name in strange:
        short = plain_name(name)
        fitting = (
            each for each in ([short] if name in plain else _shorter(short.split("."), following)) if each in own
        )
        candidate = next(fitting, None)
        if candidate is not None and candidate not in stored:
            matches.setdefault(candidate, []).append(name)
    return {names[0]: candidate for candidate, names in matches.items() if len(names) == 1}


def names_alike(stored: Collection[str], own: Collection[str]) -> dict[str, str]:
    """Maps stored names of parameters to own ones, where they differ only in "module." and wrappers' parts.

    Optimizers are given names without the modules that would tell whose a "module." is, each rank its own ones. Names
    that are two on one side without it are mapped to none.

    Args:
        stored: all names of one object, as they were stored.
        own: all names that it has on this rank.
    """
    here, there = _by_short_name(own), _by_short_name(stored)
    pairs = ((there[short], here[short]) for short in there.keys() & here.keys())
    return {old[0]: new[0] for old, new in pairs if len(old) == len(new) == 1 and old != new}


def _by_short_name(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_ANY_DDP.sub("", plain_name(name)), []).append(name)
    return found


def _shorter(segments: Sequence[str], following: Mapping[str, set[str]]) -> Iterator[str]:
    """Yields a name, and its forms without some of the "module" that have no sibling; fewest omissions first."""
    spare = [i for i in range(len(segments) - 1) if following[".".join(segments[:i])] == {"module"}][:_MOST_SPARE]
    for count in range(len(spare) + 1):
        for dropped in combinations(spare, count):
            yield ".".join(segment for i, segment in enumerate(segments) if i not in dropped)


@dataclass(eq=False)
class ParameterNames:
    """The names of parameters in an app: those in its modules, and in its dicts and lists.

    Args:
        app: nested dicts, lists and tuples; looked through when a name is asked for.
    """

    app: Any

    def of(self, parameters: Sequence[Tensor], otherwise: Sequence[str]) -> tuple[str, ...] | None:
        """Returns the plain names of one optimizer's parameters; None if all have none, or two share one.

        They are those of the first module that has all of them. Of several modules, in which two have one name, the
        places of the modules in the app stand before them. Parameters that the app has no more, such as those of a
        layer that was replaced, are "?0", "?1" and so on, in their order: the others keep their names.

        Args:
            otherwise: the name of each that is in no module; "" for none.
        """
        known = {*chain.from_iterable(own for _, own in self._places)}
        held = [id(each) for each, name in zip(parameters, otherwise, strict=True) if name or id(each) in known]
        whole = next((own for _, own in self._places if all(each in own for each in held)), None)
        found = [("", whole.get(id(each), "")) for each in parameters] if whole is not None else []
        for each, name in zip(parameters, otherwise, strict=True) if whole is None else ():
            places = ((place, own[id(each)]) for place, own in self._places if id(each) in own)
            found.append(next(places, ("", plain_name(name))))
        names = [name for _, name in found]
        if max(Counter(filter(None, names)).values(), default=0) > 1:
            names = [f"{place}.{name}" if place else name for place, name in found]
        if not any(names):
            return None
        dropped, nameless = before_all([*filter(None, names)]), [i for i, name in enumerate(names) if not name]
        names = [name.removeprefix(dropped) for name in names]
        for number, i in enumerate(nameless):
            names[i] = f"{NAMELESS}{number}"
        return tuple(names) if len(set(names)) == len(names) else None

    def refuse_id(self, part: int, path: Path) -> None:
        """Raises StateError if a key of the dict at a path is the `id()` of a parameter: another process has others."""
        names = [f"{place}.{own[part]}" if place else own[part] for place, own in self._places if part in own]
        if names:
            found = f"the id() of {names[0]!r}, which another process has otherwise"
            key = join((*path, part))
            problem = Problem(key, found, "a lasting key", "have its state_dict() name the parameters")
            raise StateError("a key cannot be stored", [problem])

    @cached_property
    def _places(self) -> list[tuple[str, Mapping[int, str]]]:
        """Key of each module in the app → names of its parameters by identity; last, those of the app's own tensors."""
        modules: list[tuple[str, Mapping[int, str]]] = []
        tensors: dict[int, str] = {}
        seen = set()
        ahead: list[tuple[str, Any]] = [("", self.app)]
        while ahead:
            place, node = ahead.pop()
            if isinstance(node, Tensor):
                tensors.setdefault(id(node), place)
            elif isinstance(node, Module):
                node = _innermost(node)
                # What `fully_shard` has gathered for a forward stands in the place of what optimizers have.
                named = [*node.named_parameters(), *named_shards_of(node)]
                plain = plain_names_in(node, [name for name, _ in named])
                modules.append((place, {id(each): plain.get(name, name) for name, each in reversed(named)}))
            elif isinstance(node, Mapping | list | tuple) and id(node) not in seen:
                seen.add(id(node))
                parts = node.items() if isinstance(node, Mapping) else enumerate(node)
                within = [(f"{place}.{part}" if place else str(part), child) for part, child in parts]
                ahead += reversed(within)
        return [*modules, ("", tensors)]


def _innermost(module: Module) -> Module:
    """Returns the module whose names occur in the state of another library's wrapper around it.

    Such a wrapper hands out the state of what it wraps, which has all its parameters.
    """
    while type(module).state_dict is not Module.state_dict:
        own = {id(each) for each in module.parameters()}
        inner = next((each for each in module.children() if own == {id(one) for one in each.parameters()}), None)
        if inner is None:
            break
        module = inner
    return module
