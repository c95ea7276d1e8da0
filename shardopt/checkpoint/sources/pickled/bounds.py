"""Limits what a short pickle can ask for: hashing of keys, and the size and depth of its result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardopt.checkpoint.sources.pickled.tensor_globals import TensorRecord
from shardopt.errors import FormatError, Problem
from shardopt.state.values import KeyProbes

MOST_DEPTH = 100
"""The depth to which containers may be nested, so that recursion over them stays possible."""

_MOST_KEY_DEPTH = 4
_MOST_OF_ONE_HASH = 64
_MOST_KEY_BITS = 4096  # of an int, whose hash is worked out each time
_OWN_HASH = 2**61 - 1  # ints below it have themselves as their hash: no two have the same
_KEY_NODES_PER_BYTE, _SPARE_KEY_NODES = 4, 4096
_NODES_PER_BYTE, _SPARE_NODES = 16, 2**14
_CHARACTERS_PER_NODE = 16
_NODES_PER_TENSOR = 256  # by the work that each is where it stands
_REMEDY = "save only plain values and tensors, each once"


class Keys:
    """The keys of all dicts and sets of one pickle.

    Ints and tuples, whose hashes anyone can work out, may be made such that all are the same, and take quadratic time;
    a tuple may refer to another over and over, and take exponential time, or be nested deeper than C can hash.
    """

    def __init__(self, pickle_bytes: int) -> None:
        self._nodes_left = _SPARE_KEY_NODES + _KEY_NODES_PER_BYTE * pickle_bytes
        self._by_hash: dict[int, list[Any]] = {}
        self._probes: dict[int, tuple[object, KeyProbes]] = {}  # with what is filled, so that it keeps its identity

    def check(self, keys: Sequence[Any], into: dict[Any, Any] | set[Any]) -> None:
        """Raises ValueError or TypeError if one of the keys cannot be put into a dict or set."""
        for key in keys:
            kind = type(key)
            if kind is str or key is None or kind is bool or (kind is int and -_OWN_HASH < key < _OWN_HASH):
                continue
            self._check_size(key, 1)
            same = self._by_hash.setdefault(hash(key), [])
            if not any(other is key or other == key for other in same):
                same.append(key)
                if len(same) > _MOST_OF_ONE_HASH:
                    raise ValueError("keys that all have the same hash")
        # Mostly texts, or numbers from 0 on; else the places of all its keys are followed from the beginning.
        probes = self._probes.get(id(into))
        if probes is not None:
            probes[1].add(keys)
        elif any(type(key) is not str and key != number for number, key in enumerate(keys, len(into))):
            self._probes[id(into)] = into, KeyProbes(type(into) is set, (*into, *keys))

    def _check_size(self, key: Any, depth: int) -> None:
        if type(key) is int and key.bit_length() > _MOST_KEY_BITS:
            raise ValueError("a key that is a huge number")
        if type(key) is not tuple:
            return
        self._nodes_left -= len(key)
        if depth > _MOST_KEY_DEPTH or self._nodes_left < 0:
            raise ValueError("a key nested too deep, or too large")
        for item in key:
            self._check_size(item, depth + 1)


def check_result(result: Any, pickle_bytes: int, where: str) -> None:
    """Raises if plain containers contain themselves, are nested too deep, or would be far larger written out.

    Raises:
        FormatError: they do.
    """
    most_nodes = _SPARE_NODES + _NODES_PER_BYTE * pickle_bytes
    measured: dict[int, tuple[int, int]] = {}  # by identity: nodes when written out, and depth
    entered: set[int] = set()
    todo = [(result, False)]
    while todo:
        node, children_are_done = todo.pop()
        if not _is_container(node) or id(node) in measured:
            continue
        if not children_are_done:
            if id(node) in entered:
                raise _refused(where, "a list, tuple or dict that holds itself", "values as a tree")
            entered.add(id(node))
            todo.append((node, True))
            todo.extend((child, False) for child in _children(node) if _is_container(child))
            continue
        nodes, depth = 1, 1
        for child in _children(node):
            if _is_container(child):
                child_nodes, child_depth = measured[id(child)]
                nodes += child_nodes
                depth = max(depth, 1 + child_depth)
            else:
                nodes += _nodes_of_leaf(child)
        if depth > MOST_DEPTH:
            raise _refused(where, "a value nested too deep", f"at most {MOST_DEPTH} levels")
        if nodes > most_nodes:
            raise _refused(where, "references by which a small value stands for a huge one", "each value once")
        measured[id(node)] = (nodes, depth)


def _is_container(value: Any) -> bool:
    return type(value) in (list, tuple, set) or isinstance(value, dict)


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        yield from node.keys()
        yield from node.values()
    else:
        yield from node


def _nodes_of_leaf(value: Any) -> int:
    if isinstance(value, str | bytes):
        return 1 + len(value) // _CHARACTERS_PER_NODE
    if type(value) is int:
        return 1 + value.bit_length() // (8 * _CHARACTERS_PER_NODE)
    if isinstance(value, TensorRecord):
        return _NODES_PER_TENSOR
    return 1 + value.nbytes // _CHARACTERS_PER_NODE if isinstance(value, np.ndarray) else 1


def _refused(where: str, found: str, required: str) -> FormatError:
    return FormatError("a pickle describes what is not read here", [Problem(where, found, required, _REMEDY)])
