"""Binds rules to the keys of a checkpoint: which new tensor consists of which stored ones. Reads no tensor.

    key  →  before + name + after       "optimizer.state." + "layers.0.wq.weight" + ".exp_avg"

Stored keys that a rule names with the same texts of placeholders, and with the same before and after, are one *join*:
the rule is applied to each join by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import NamedTuple

from shardopt.checkpoint.format.constants import Dtype
from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.rearrange.geometry import Place
from shardopt.checkpoint.rearrange.notation import Found, infer, renamed_path, size_of
from shardopt.checkpoint.rearrange.rules import AnyRule, Drop, Rule
from shardopt.errors import MismatchError, Problem
from shardopt.state.paths import Path
from shardopt.state.values import encode_value


class Component(NamedTuple):
    """A section of a new tensor: its place there, the stored tensor, and the place in it; None means zeros."""

    new: Place
    key: str | None
    old: Place | None


@dataclass(frozen=True)
class NewTensor:
    """A new tensor that consists of stored ones.

    Args:
        components: sections that together are all of it.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    components: tuple[Component, ...]


@dataclass
class Binding:
    """The result of applying rules to a checkpoint.

    Args:
        keys: new key → the stored key of the same tensor or value, for what is renamed or left as it is, and values
            and counters that stand for several.
        tensors: tensors that are made of others, by new key.
        paths: of all new keys.
        equal: stored tensors without dimensions that must be equal, as only the first of each list is loaded.
        left_out: stored keys that are dropped, and sections.
    """

    keys: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, NewTensor] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    equal: list[tuple[str, list[str]]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class _Member(NamedTuple):
    """A stored key of a join: the number of the rule's old tensor, and the indices of axes in the key's name."""

    tensor: int
    indices: tuple[str, ...]


class _JoinKey(NamedTuple):
    rule: Rule
    number: int
    before: str
    free: tuple[str, ...]
    after: str


_Join = dict[_Member, tuple[str, Found]]


def bind(manifest: Manifest, rules: Sequence[AnyRule]) -> Binding:
    """Applies rules to the keys of a checkpoint; each key goes with the first rule that names it.

    Raises:
        MismatchError: lists all that does not fit the rules: names that are missing, shapes, dtypes, options that
            differ, state of another layout than its parameter, two tensors for one name.
    """
    bound = Binding()
    joins: dict[tuple[int, str, tuple[str, ...], str], _Join] = defaultdict(dict)
    stored = _stored_paths(manifest)
    problems: list[Problem] = []
    for key, path in stored.items():
        number, found, member = first_match(key, path, rules)
        if found is None:
            bound.keys[key], bound.paths[key] = key, path
        elif member is None:
            bound.left_out.append(key)
        else:
            free = tuple(found.fields[each] for each in _rule(rules, number).free_fields)
            joins[number, found.before, free, found.after][member] = key, found
    shapes = _parameter_shapes(manifest, joins)
    for (number, before, free, after), members in joins.items():
        at = _JoinKey(_rule(rules, number), number, before, free, after)
        problems += _Binder(manifest, stored, at, members, shapes[number, free], bound).bind()
    if problems:
        raise MismatchError(
            "the checkpoint does not fit the rules for rearranging; nothing was changed", problems, code="bad-rules"
        )
    return bound


def _stored_paths(manifest: Manifest) -> dict[str, Path]:
    paths = {key: tensor.path for key, tensor in manifest.tensors.items()}
    return paths | {key: path for key, (path, _) in manifest.values.items()} | dict(manifest.per_rank)


def _rule(rules: Sequence[AnyRule], number: int) -> Rule:
    rule = rules[number]
    assert isinstance(rule, Rule)
    return rule


def first_match(key: str, path: Path, rules: Sequence[AnyRule]) -> tuple[int, Found | None, _Member | None]:
    """Returns the first rule that names a key, with the match; no member for a dropped key."""
    for number, rule in enumerate(rules):
        if isinstance(rule, Drop):
            found = Rule(rule.name, rule.name).old_names[0].find(key, path)
            if found is not None:
                return number, found, None
        elif isinstance(rule, Rule):
            for tensor, name in enumerate(rule.old_names):
                found = name.find(key, path)
                indices = rule.axes_in(name)
                if found is not None and all(found.fields[each].isdecimal() for each in indices):
                    return number, found, _Member(tensor, tuple(found.fields[each] for each in indices))
    return 0, None, None


def _parameter_shapes(
    manifest: Manifest, joins: Mapping[tuple[int, str, tuple[str, ...], str], _Join]
) -> dict[tuple[int, tuple[str, ...]], dict[_Member, tuple[int, ...]]]:
    """Returns the shapes of the parameters themselves, which are stored under only their names."""
    shapes: defaultdict[tuple[int, tuple[str, ...]], dict[_Member, tuple[int, ...]]] = defaultdict(dict)
    for (number, _, free, after), members in joins.items():
        for member, (key, _) in members.items():
            if not after and key in manifest.tensors:
                shapes[number, free].setdefault(member, manifest.tensors[key].layout.shape)
    return shapes


class _Binder:
    """Binds one join, and yields its problems."""

    def __init__(
        self,
        manifest: Manifest,
        stored: Mapping[str, Path],
        at: _JoinKey,
        members: _Join,
        parameter: Mapping[_Member, tuple[int, ...]],
        bound: Binding,
    ) -> None:
        self._manifest, self._stored, self._at, self._members = manifest, stored, at, members
        self._parameter, self._bound, self._rule = parameter, bound, at.rule
        self._free = dict(zip(self._rule.free_fields, at.free, strict=True))
        self._sizes = dict(self._rule.sizes)

    def bind(self) -> Iterator[Problem]:
        keys = [key for key, _ in self._members.values()]
        tensors = [key for key in keys if key in self._manifest.tensors]
        if not self._rule.axes.strip():
            for key, found in self._members.values():
                yield from self._add(self._rule.new_names[0].fill(found.fields), key)
            return
        problems = list(self._incomplete())
        if problems:
            yield from problems
        elif len(tensors) == len(keys) and not self._are_counters(tensors):
            yield from list(self._refused_state()) or self._bind_tensors(tensors)
        elif tensors and len(tensors) < len(keys):
            yield self._problem(keys[0], "tensors and plain values", "one kind")
        else:
            yield from self._bind_alike(keys)

    # The stored keys.

    def _incomplete(self) -> Iterator[Problem]:
        """Yields a problem for each stored key that the join lacks, and computes the sizes of axes in names."""
        for tensor, name in enumerate(self._rule.old_names):
            given = [member.indices for member in self._members if member.tensor == tensor]
            for i, axis in enumerate(self._rule.axes_in(name)):
                if axis not in self._rule.sizes:
                    largest = max((int(indices[i]) for indices in given), default=-1)
                    self._sizes[axis] = max(self._sizes.get(axis, 0), largest + 1)
        for tensor, name in enumerate(self._rule.old_names):
            axes = self._rule.axes_in(name)
            wanted = {(tensor, indices) for indices in product(*(range(self._sizes[axis]) for axis in axes))}
            have = [member for member in self._members if member.tensor == tensor]
            if len(have) == len(wanted) and self._texts.keys() >= wanted:
                continue
            key = f"{self._at.before}{name.fill({**dict.fromkeys(name.fields, '*'), **self._free})}{self._at.after}"
            sizes = {axis: self._sizes[axis] for axis in axes}
            required = f"{len(wanted)} of them ({sizes})" if axes else "one, to be joined with what there is"
            yield self._problem(key, f"{len(have)} that there are", required)

    @cached_property
    def _texts(self) -> dict[tuple[int, tuple[int, ...]], tuple[str, ...]]:
        """Tensor and indices → the texts of the indices in the key, which may have leading zeros."""
        return {(member.tensor, tuple(map(int, member.indices))): member.indices for member in self._members}

    # Plain values and counters.

    def _are_counters(self, keys: Sequence[str]) -> bool:
        """Whether these are scalars that belong to parameters, such as "step"."""
        tensors = self._manifest.tensors
        return bool(self._at.after) and all(tensors[key].layout.shape == () for key in keys)

    def _bind_alike(self, keys: Sequence[str]) -> Iterator[Problem]:
        """Binds values that must be equal under all stored names, and go to all new names: options and counters."""
        values = self._manifest.values
        if keys[0] in self._manifest.tensors:
            if len(keys) > 1:
                self._bound.equal.append((str(self._rule), list(keys)))
        elif any(key in self._manifest.per_rank for key in keys):
            yield self._problem(keys[0], "a value per rank", "tensors, options or counters")
            return
        else:
            first = encode_value(values[keys[0]][1], keys[0])
            other = next((key for key in keys[1:] if encode_value(values[key][1], key) != first), None)
            if other is not None:
                yield unequal(other, keys[0], str(self._rule))
                return
        for member, shape in self._parameter.items():  # which tell the sizes of axes that new names have
            axes = self._rule.old_axes[member.tensor]
            axes = axes.with_rest(max(len(shape) - len(axes.items) + 1, 0))
            for item, size in zip(axes.items, shape, strict=False):
                infer(item, size, self._sizes)
        unknown = self._unknown({axis for name in self._rule.new_names for axis in self._rule.axes_in(name)}, keys[0])
        if unknown:
            yield unknown
            return
        for name, _, _ in self._new_names():
            yield from self._add(name, keys[0])

    # Tensors.

    def _refused_state(self) -> Iterator[Problem]:
        """Yields a problem for each state tensor that is not laid out like its parameter."""
        for member, (key, _) in self._members.items() if self._at.after else ():
            shape = self._manifest.tensors[key].layout.shape
            remedy = (
                f"load it into the arrangement that it was saved in, or leave it out with Drop({key!r}) before the rule"
            )
            if member not in self._parameter:
                required = "its parameter in the same checkpoint, whose shape tells how state is laid out"
                yield Problem(key, "only state", required, remedy)
            elif shape != self._parameter[member]:
                required = f"{list(self._parameter[member])}, as its parameter has, for {self._rule}"
                yield Problem(key, f"state of shape {list(shape)}", required, remedy)

    def _bind_tensors(self, keys: Sequence[str]) -> Iterator[Problem]:
        """Binds the new tensors; yields problems of shapes and dtypes instead, if any."""
        rule, tensors = self._rule, self._manifest.tensors
        dtype = tensors[keys[0]].dtype
        other = next((key for key in keys if tensors[key].dtype != dtype), None)
        if other is not None:
            yield self._problem(other, tensors[other].dtype.name, f"{dtype.name}, as {keys[0]} has")
            return
        misfit = self._infer_sizes()
        if misfit:
            yield misfit
            return
        rest = self._rest
        self._old_axes = [axes.with_rest(rest) for axes in rule.old_axes]
        self._new_axes = [axes.with_rest(rest) for axes in rule.new_axes]
        wanted = {axis for name in rule.new_names for axis in rule.axes_in(name)}
        for _, section in rule.matches:
            wanted.update(self._new_axes[section.tensor].names(section.section))
        for section in rule.pads:
            wanted.update(self._new_axes[section.tensor].names(section.section))
        unknown = self._unknown(wanted, keys[0])
        if unknown:
            yield unknown
            return
        self._list_dropped()
        for name, tensor, indices in self._new_names():
            components = (*self._components(tensor, indices), *self._zeros(tensor))
            made = NewTensor(dtype, self._new_axes[tensor].shape(self._sizes), components)
            yield from self._add(name, made)

    def _components(self, tensor: int, indices: Mapping[str, int]) -> Iterator[Component]:
        """Yields the components of a new tensor.

        Args:
            indices: of the axes that its name has.
        """
        rule = self._rule
        for old, new in rule.matches:
            if new.tensor != tensor:
                continue
            axes = rule.axes_in(rule.old_names[old.tensor])
            old_place = Place(self._old_axes[old.tensor].digits(old.section, self._sizes, indices))
            for each in product(*(range(self._sizes[axis]) for axis in axes)):
                key, _ = self._members[_Member(old.tensor, self._texts[old.tensor, each])]
                fixed = dict(zip(axes, each, strict=True))
                yield Component(Place(self._new_axes[tensor].digits(new.section, self._sizes, fixed)), key, old_place)

    def _zeros(self, tensor: int) -> Iterator[Component]:
        for pad in self._rule.pads:
            if pad.tensor == tensor:
                yield Component(Place(self._new_axes[tensor].digits(pad.section, self._sizes, {})), None, None)

    def _list_dropped(self) -> None:
        for tensor, section in self._rule.dropped:
            pad = (self._old_axes[tensor].sections or ())[section]
            size = size_of(pad, self._sizes)
            keys = [key for member, (key, _) in self._members.items() if member.tensor == tensor]
            self._bound.left_out += [f"{key} ({pad}: {size})" for key in keys if size]

    @cached_property
    def _rest(self) -> int:
        """The number of dimensions that "..." stands for: those of the first tensor with it, beyond its named ones."""
        for member, (key, _) in self._members.items():
            axes = self._rule.old_axes[member.tensor]
            if axes.has_rest:
                return max(len(self._manifest.tensors[key].layout.shape) - len(axes.items) + 1, 0)
        return 0

    def _infer_sizes(self) -> Problem | None:
        """Computes the sizes of axes from stored shapes; returns a problem if these do not fit the rule."""
        shapes = [
            (key, self._rule.old_axes[member.tensor].with_rest(self._rest), self._manifest.tensors[key].layout.shape)
            for member, (key, _) in self._members.items()
        ]
        for key, axes, shape in shapes:
            if len(axes.items) != len(shape):
                return self._misfit(key, shape)
        known = -1
        while known < len(self._sizes):  # a later tensor may tell what an earlier one lacked
            known = len(self._sizes)
            for key, axes, shape in shapes:
                if not all(infer(item, size, self._sizes) for item, size in zip(axes.items, shape, strict=True)):
                    return self._misfit(key, shape)
        return None

    def _misfit(self, key: str, shape: tuple[int, ...]) -> Problem:
        sizes = f" with {dict(self._sizes)}" if self._sizes else ""
        return self._problem(key, f"the shape {list(shape)}", f"one that its axes make{sizes}")

    def _unknown(self, wanted: Iterable[str], key: str) -> Problem | None:
        """Returns a problem if the sizes of some axes are unknown."""
        unknown = sorted(set(wanted) - self._sizes.keys())
        if not unknown:
            return None
        return Problem(key, f"no size of {', '.join(unknown)}", f"it, for {self._rule}", "give sizes={...} to the rule")

    # Under which names.

    def _new_names(self) -> Iterator[tuple[str, int, dict[str, int]]]:
        """Yields the new names, each with the number of its tensor and the indices of axes in the name."""
        for tensor, name in enumerate(self._rule.new_names):
            axes = self._rule.axes_in(name)
            for indices in product(*(range(self._sizes[axis]) for axis in axes)):
                fixed = dict(zip(axes, indices, strict=True))
                yield name.fill({**self._free, **{axis: str(i) for axis, i in fixed.items()}}), tensor, fixed

    def _add(self, name: str, made: NewTensor | str) -> Iterator[Problem]:
        """Adds a tensor, or a stored key, under a new name; yields a problem if the name is taken."""
        key, found = next(iter(self._members.values()))
        new, bound = f"{self._at.before}{name}{self._at.after}", self._bound
        if new in bound.tensors or new in bound.keys:
            others = f"{bound.keys[new]} and {key}" if new in bound.keys else f"what another rule makes, and {key}"
            yield self._problem(new, others, "one for each name")
            return
        bound.paths[new] = renamed_path(self._stored[key], len(found.before), len(found.name), name)
        if isinstance(made, str):
            bound.keys[new] = made
        else:
            bound.tensors[new] = made

    def _problem(self, key: str, found: str, required: str) -> Problem:
        return Problem(key, found, f"{required}, for {self._rule}", "mend the rule")


def unequal(key: str, other: str, rule: str) -> Problem:
    """Returns the problem of joined values that differ."""
    remedy = "make them equal before saving, or load them in the arrangement that they were saved in"
    return Problem(key, f"another value than {other}", f"the same, as {rule} joins them", remedy)
