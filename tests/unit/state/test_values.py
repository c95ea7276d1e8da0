"""Plain values: what comes back is what went in, to its exact type; what could not is refused by name."""

import datetime
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import StrEnum
from fractions import Fraction
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.errors import StateError
from shardopt.state.values import canonical, decode_value, encode_value
from tests.support.drawn import examples


def through_json(value):
    return decode_value(json.loads(json.dumps(encode_value(value), allow_nan=False)))


def same(a, b):
    """Equal, with equal types all the way down; nan is nan, and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) or (isinstance(a, np.generic) and a.dtype.kind in "fc"):
        return np.asarray(a).tobytes() == np.asarray(b).tobytes() or (a != a and b != b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) and type(k) in (str, int) for k in a)
    if isinstance(a, set):
        return {(type(x), x) for x in a} == {(type(x), x) for x in b}
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return a == b


NUMPY_SCALARS = [
    *(np.dtype(f"{kind}{size}").type for kind in "iu" for size in (1, 2, 4, 8)),
    *(np.float16, np.float32, np.float64, np.complex64, np.complex128, np.bool_, np.longdouble),
]
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
SCALARS = st.sampled_from(NUMPY_SCALARS).flatmap(lambda kind: st.integers(0, 100).map(kind))
VALUES = st.recursive(
    HASHABLE | st.floats() | SCALARS | st.integers(-(2**70), 2**70),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(HASHABLE, max_size=4),
        st.dictionaries(WORDS | st.integers(), inner, max_size=4),
        st.dictionaries(WORDS | st.integers(), st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_exactly(value):
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [
        *(sign * (2**53 + more) for sign in (1, -1) for more in (-1, 0, 1)),
        *(2**n + more for n in (8192, 70_000) for more in (-1, 0, 1)),
        -(10**5000),
        *(math.inf, -math.inf, math.nan, -0.0, 5e-324, 1.7976931348623157e308, 0.1),
        *({}, [], (), set(), Counter(), "", b""),
        {1: "int", "1": "str"},
        Counter(a=-1, b=0.5),
        [True, 1, 1.0, np.float64(1), np.bool_(True)],
        {(1, (2, b"3")), "x", None},
        "\0 \U0001f600 \x7f",
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else f"{value.bit_length()} bits",
)
def test_edges_come_back_exactly(value):
    assert same(through_json(value), value)


@pytest.mark.parametrize("kind", NUMPY_SCALARS)
def test_numpy_scalars_keep_type_and_bits(kind):
    numbers = [0, 1, 100]
    if np.dtype(kind).kind in "fc":
        numbers += [math.inf, math.nan, -0.0, 0.1]
    for number in numbers:
        assert same(through_json(kind(number)), kind(number))


def test_arrays_and_small_tensors():
    for array in (
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.zeros((0, 3), np.int8),
        np.array(2.5),
        np.arange(6).reshape(2, 3).T,
        np.array([True]),
    ):
        back = through_json(array)
        assert same(back, np.ascontiguousarray(array) if array.ndim else array)
        assert back.flags.writeable
    for tensor in (
        torch.get_rng_state(),
        torch.zeros(0, 2),
        torch.tensor(3),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.arange(6).reshape(2, 3).T,
        torch.ones(2, requires_grad=True),
        torch.tensor([True, False]),
        torch.ones(3).to(torch.float8_e4m3fn).view(torch.float8_e8m0fnu).view(torch.uint8),
    ):
        back = through_json(tensor)
        assert same(back, tensor.detach().resolve_conj())
        back.zero_()  # has memory of its own, that may be written


class Word(str):
    pass


class Number(np.float64):
    pass


class Masked(np.ma.MaskedArray):
    pass


class Colour(StrEnum):
    RED = "red"


Pair = namedtuple("Pair", "a b")
DEEP: list = []
for _ in range(100):
    DEEP = [DEEP]
LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Word("x"), "Word"),
        (Number(1), "Number"),
        (Colour.RED, "Colour"),
        (Pair(1, 2), "Pair"),
        (OrderedDict(a=1), "OrderedDict"),
        (defaultdict(list), "defaultdict"),
        (frozenset(), "frozenset"),
        (bytearray(b"x"), "bytearray"),
        (range(3), "range"),
        (object(), "object"),
        (lambda: None, "function"),
        (1j, "complex"),
        (Fraction(1, 2), "Fraction"),
        (datetime.datetime(2020, 1, 1), "datetime"),
        (PurePosixPath("x"), "PurePosixPath"),
        (torch.float32, "dtype"),
        (torch.Size([2]), "Size"),
        (torch.device("cpu"), "device"),
        (torch.nn.Parameter(torch.ones(1)), "Parameter"),
        (torch.empty(1, device="meta"), "Tensor"),
        (torch.eye(2).to_sparse(), "Tensor"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (np.str_("x"), "str_"),
        (np.array(["x"]), "ndarray"),
        (np.array([None]), "ndarray"),
        (np.zeros(2, [("a", "f4")]), "ndarray"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        (np.zeros((2, 2)).view(np.matrix), "matrix"),
        (DEEP, "nested deeper"),
        (LOOP, "nested deeper"),
        ("\ud800", "Unicode"),
        ({"\udfff": 1}, "Unicode"),
        ({True: 1}, "key of type bool"),
        ({1.5: 1}, "key of type float"),
        ({None: 1}, "key of type NoneType"),
        ({Word("x"): 1}, "key of type Word"),
    ],
)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # of np.matrix
def test_what_would_not_come_back_is_refused_by_name(value, said):
    with pytest.raises(StateError, match=said) as refusal:
        encode_value({"options": [1, value]}, "schedule")
    (problem,) = refusal.value.problems
    assert problem.key.startswith("schedule['options'][1]")


def test_the_error_of_a_common_type_names_the_line_to_write():
    for value, line in ((OrderedDict(), "dict(it)"), (deque(), "a list"), (torch.float32, "str(it)")):
        with pytest.raises(StateError) as refusal:
            encode_value([value])
        assert line in refusal.value.problems[0].remedy


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)
KINDS = st.sampled_from(["int", "float", "bytes", "tuple", "set", "dict", "counter", "numpy", "tensor", "other"])
NAMES = st.sampled_from(["<f4", "|u1", "<c99", "O", "f4,f4", "(2,", "float32", "uint4", "quint8", "nn", "_dynamo", ""])
RAW = st.sampled_from(["", "AAAA", "AAAAAAAA", "A", "é", "AAAAAA==", "####"])
SHAPES = st.none() | st.lists(st.integers(-2, 9) | st.booleans() | st.just(2**70), max_size=3) | JSON
TYPED = st.builds(
    lambda kind, body: {kind: body},
    KINDS,
    JSON
    | st.lists(st.lists(JSON, min_size=2, max_size=2), max_size=3)
    | st.tuples(NAMES, SHAPES, RAW).map(list)
    | st.sampled_from(["ff", "0x1f", "1_0", "-", " 1", "inf", "Infinity"]),
)


@settings(max_examples=examples(400))
@given(
    st.recursive(TYPED | JSON, lambda inner: st.lists(inner, max_size=3) | st.builds(lambda k, v: {k: v}, KINDS, inner))
)
def test_any_json_is_decoded_or_refused(wire):
    """A decoded value can be stored again."""
    try:
        value = decode_value(wire)
    except StateError as error:
        assert len(str(error)) < 1000
        return
    assert canonical(encode_value(decode_value(encode_value(value)))) == canonical(encode_value(value))


def deep_json(kind, levels):
    wire = 1
    for _ in range(levels):
        wire = {"tuple": [wire]} if kind == "tuple" else [wire] if kind == "list" else {"unknown": wire}
    return wire


@pytest.mark.parametrize("kind", ["list", "tuple", "unknown"])
@pytest.mark.parametrize("levels", [200, 900])
def test_deep_json_is_refused(kind, levels):
    with pytest.raises(StateError):
        decode_value(deep_json(kind, levels))
    with pytest.raises(StateError):
        decode_value({"int": deep_json("list", levels)})


def test_names_in_the_wire_import_nothing():
    for name in ("_dynamo", "classes", "nn", "__version__", "load"):
        with pytest.raises(StateError):
            decode_value({"tensor": [name, [1], "AAAA"]})
    for name in (None, "object", "float", "f4, (", "M8[s]", "<f99"):
        with pytest.raises(StateError):
            decode_value({"numpy": [name, [1], "AAAA"]})


@given(VALUES)
def test_canonical_is_equal_for_a_copy(value):
    assert canonical(encode_value(through_json(value))) == canonical(encode_value(value))


def test_canonical_tells_values_apart_but_not_the_order_of_entries():
    def text(value):
        return canonical(encode_value(value))

    assert text({"a": 1, "b": [{"x": 1, 2: 3}]}) == text({"b": [{2: 3, "x": 1}], "a": 1})
    assert text(Counter("ab")) == text(Counter("ba"))
    assert text({3, "x", (1, 2)}) == text({(1, 2), 3, "x"})
    different = [1, 1.0, True, "1", b"1", [1], (1,), {1}, {1: 1}, {"1": 1}, Counter({1: 1}), np.int64(1), np.int32(1)]
    different += [0.0, -0.0, math.nan, math.inf, None, np.array(1), np.array([1]), torch.tensor(1), [[1]], [1, 1]]
    assert len({text(value) for value in different}) == len(different)
    assert text([1, 2]) != text([2, 1])
