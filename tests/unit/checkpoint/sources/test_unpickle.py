"""Pickles are read as data: plain values come back, nothing else is made, and nothing is run, whatever they say."""

import collections
import os
import pickle
import pickletools
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.checkpoint.sources.pickled.bounds import MOST_DEPTH
from shardopt.checkpoint.sources.pickled.plain_globals import PLAIN_GLOBALS
from shardopt.checkpoint.sources.pickled.stand_ins import Known, StandIn, Unknown
from shardopt.checkpoint.sources.pickled.unpickle import unpickle
from shardopt.errors import CorruptionError, FormatError, ShardoptError
from shardopt.state.values import encode_value
from tests.support.drawn import examples

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**80), 2**80), st.floats(), st.text(max_size=300), st.binary(max_size=300)
)
keys = st.one_of(st.text(max_size=5), st.integers(-(2**40), 2**40))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(keys, inner, max_size=5),
        st.sets(keys, max_size=5),
    ),
    max_leaves=20,
)


@settings(max_examples=examples(60), deadline=None)
@given(values, st.sampled_from(PROTOCOLS))
def test_plain_values_come_back_with_their_types(value, protocol):
    assert encode_value(unpickle(pickle.dumps(value, protocol), "w", PLAIN_GLOBALS)) == encode_value(value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_long_values_come_back(protocol):
    value = {
        "texts": ["x" * 70_000, "ü" * 300],
        "bytes": b"x" * 70_000,
        "number": -(2**3000),
        "list": list(range(3000)),
    }
    value["dict"] = {str(i): (i, i * 300, i * 70_000) for i in range(3000)}
    assert unpickle(pickle.dumps(value, protocol), "w", PLAIN_GLOBALS) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_shared_stays_shared(protocol):
    shared = [1]
    loaded = unpickle(pickle.dumps({"a": shared, "b": (shared,)}, protocol), "w", {})
    assert loaded["a"] is loaded["b"][0]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_dicts_of_other_kinds_are_dicts(protocol):
    state = collections.OrderedDict(a=1)
    state._metadata = {"": {"version": 1}}  # as modules give it
    value = [state, collections.defaultdict(list, b=[2]), collections.Counter("aab")]
    loaded = unpickle(pickle.dumps(value, protocol), "w", PLAIN_GLOBALS)
    assert [type(item) for item in loaded] == [dict, dict, collections.Counter]
    assert loaded == [{"a": 1}, {"b": [2]}, {"a": 2, "b": 1}]


CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
REFUSED = {
    *("DUP", "FLOAT", "INT", "LONG", "PERSID", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "DICT", "GET"),
    *("INST", "LIST", "OBJ", "PUT", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_other_opcodes_are_refused_by_name(name):
    with pytest.raises(FormatError, match=f"the opcode {name};"):
        unpickle(b"\x80\x02N" + bytes([CODES[name]]) + b"0\n.", "w", {})


@pytest.mark.parametrize("name", sorted(CODES.keys() - REFUSED))
def test_all_opcodes_of_picklers_are_interpreted(name):
    with pytest.raises(CorruptionError):  # of the zeros behind it
        unpickle(b"\x80\x02N" + bytes([CODES[name]]) + bytes(9), "w", {})


class Calls:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


HOSTILE_CALLS = {
    "system": lambda mark: Calls(os.system, f"touch {mark}"),
    "eval": lambda mark: Calls(eval, f"open({str(mark)!r}, 'w')"),
    "import": lambda mark: Calls(__import__, "antigravity"),
    "getattr": lambda mark: Calls(getattr, Calls(__import__, "os"), "mkdir"),
    "nested": lambda mark: Calls(map, Calls(getattr, Calls(__import__, "os"), "mkdir"), [str(mark)]),
    "within a set": lambda mark: Calls(set, [Calls(os.mkdir, str(mark))]),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", HOSTILE_CALLS)
def test_nothing_is_run_and_the_rest_is_there(tmp_path, name, protocol):
    mark = tmp_path / "mark"
    data = pickle.dumps({"before": 1, "it": HOSTILE_CALLS[name](mark), "after": [2]}, protocol)
    loaded = unpickle(data, "w", PLAIN_GLOBALS)
    it = loaded.pop("it")
    assert loaded == {"before": 1, "after": [2]} and not mark.exists()
    if name == "within a set":
        (it,) = it
        assert it.name == "posix.mkdir"
    assert isinstance(it, Unknown)


def test_unknown_objects_have_the_name_of_their_class_and_swallow_their_state():
    class_name = f"{__name__}.Local"
    value = {"object": Local(), "class": collections.OrderedDict, "list": LocalList([1, 2]), "dict": LocalDict(a=1)}
    for protocol in PROTOCOLS:
        loaded = unpickle(pickle.dumps(value, protocol), "w", PLAIN_GLOBALS)
        names = [loaded[key].name for key in value]
        assert names == [class_name, "collections.OrderedDict", f"{class_name}List", f"{class_name}Dict"]
        assert all(isinstance(item, Unknown) for item in loaded.values())


class Local:
    def __init__(self):
        self.x = 1


class LocalList(list):
    pass


class LocalDict(dict):
    pass


def test_a_mapping_that_raises_refuses_what_it_does_not_have():
    class Strict(dict):
        def __missing__(self, name):
            raise FormatError(f"no {name}")

    with pytest.raises(FormatError, match=r"no posix\.system"):
        unpickle(pickle.dumps(Calls(os.system, "true")), "w", Strict())


class Later(StandIn):
    __slots__ = ("state",)

    def __init__(self):
        super().__init__("later")
        self.state = None

    def build(self, state):
        self.state = state

    def settled(self):
        return self if self.state is None else ("whole", self.state)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_a_stand_in_stands_for_takes_its_place_everywhere(protocol):
    local = Local()
    known = {f"{__name__}.Local": Later, "copyreg._reconstructor": Later}
    loaded = unpickle(pickle.dumps([local, (local, local)], protocol), "w", known)
    assert loaded == [("whole", {"x": 1}), (("whole", {"x": 1}),) * 2]


def test_known_functions_are_called_by_the_pickle_alone():
    known = {"os.system": None, "posix.system": lambda command: ["asked", command], "a.b": 5}
    assert unpickle(pickle.dumps(Calls(os.system, "true")), "w", known) == ["asked", "true"]
    assert type(unpickle(pickle.dumps(os.system), "w", known)) is Known
    assert unpickle(b"\x80\x02ca\nb\n.", "w", known) == 5
    with pytest.raises(CorruptionError):  # no function
        unpickle(b"\x80\x02ca\nb\n)R.", "w", known)
    with pytest.raises(CorruptionError):  # other arguments than it takes
        unpickle(pickle.dumps(Calls(os.system, 1, 2)), "w", known)


def shared_lists(depth):
    node = []
    for _ in range(depth):
        node = [node, node]
    return node


def shared_tuples(depth):
    node = ()
    for _ in range(depth):
        node = (node, node)
    return node


def itself():
    node = []
    node.append({"again": (node,)})
    return node


SET = b"c__builtin__\nset\n"
MODULUS = 2**61 - 1  # of hashes of ints
NOTHING_BIG = 8 << 20
REFUSED = {
    "bytearray of 3 GB": pickle.dumps(Calls(bytearray, 3_000_000_000)),
    "bytes of 4 GB": b"\x80\x03B\xff\xff\xff\xffx.",
    "bytes of 2**62": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",
    "bytearray of 2**62": b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b"x.",
    "text of 4 GB": b"\x80\x02X\xff\xff\xff\xffx.",
    "text of 2**63": b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b"x.",
    "int of 4 GB": b"\x80\x02\x8b\xff\xff\xff\xff\x01.",
    "frame of 2**62": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "lists that double": pickle.dumps(shared_lists(60)),
    "tuples that double": pickle.dumps(shared_tuples(60)),
    "a list that holds itself": pickle.dumps(itself()),
    "nested deep": b"\x80\x02N" + b"\x85" * 50_000 + b".",
    "lists nested deep": b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "a key nested deep": b"\x80\x02}N" + b"\x85" * 50_000 + b"Ns.",
    "keys of tuples that double": b"\x80\x02}" + pickle.dumps(shared_tuples(40), 2)[2:-1] + b"Ns.",
    "keys of one hash": b"\x80\x02}("
    + b"".join(b"\x8a\x0a" + (i * MODULUS).to_bytes(10, "little") + b"N" for i in range(20_000))
    + b"u.",
    "keys of one hash, one by one": b"\x80\x02}"
    + b"".join(b"\x8a\x0a" + (i * MODULUS).to_bytes(10, "little") + b"Ns" for i in range(20_000))
    + b".",
    "items of one hash": b"\x80\x02" + SET + pickle.dumps([i * MODULUS for i in range(20_000)], 2)[2:-1] + b"\x85R.",
    "one list copied over and over": b"\x80\x02(]("
    + b"K\x01" * 50_000
    + b"eq\x01"
    + (SET + b"h\x01\x85R") * 1000
    + b"t.",
    "one huge key hashed over and over": b"\x80\x02}\x8b\x00\x00\x01\x00"
    + b"\x01" * 65536
    + b"q\x01Ns"
    + b"h\x01Ns" * 50_000
    + b".",
    "a long text over and over": b"\x80\x02X\x00\x00\x01\x00" + b"x" * 65536 + b"q\x010](" + b"h\x01" * 30_000 + b"e.",
    "names without end": b"\x80\x04("
    + b"".join(b"\x8c\xfa" + b"%04d" % i * 62 + b"ab\x94" for i in range(200))
    + b"".join(b"h%ch%c\x93" % (i, j) for i in range(200) for j in range(200))
    + b"t.",
    "a newer protocol": b"\x80\x06N.",
    "no opcode": b"\x80\x02\xffN.",
    "nothing": b"",
    "an end at once": b".",
    "two results": b"\x80\x02NN.",
    "more after the end": b"\x80\x02N.N.",
    "no mark": b"\x80\x02Nt.",
    "no such memo": b"\x80\x02h\x05.",
    "an empty stack": b"\x80\x02\x86.",
    "half an entry": b"\x80\x02}(NNNu.",
    "a list as a key": b"\x80\x02}]Ns.",
    "items for a number": b"\x80\x02K\x01Na.",
    "state for a number": b"\x80\x02K\x01}b.",
    "a call of a text": b"\x80\x02X\x01\x00\x00\x00x)R.",
    "a global without a name": b"\x80\x04NN\x93.",
    "an id of a storage": b"\x80\x02K\x01Q.",
    "no UTF-8": b"\x80\x02X\x02\x00\x00\x00\xff\xff.",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bombs_are_refused_with_little_memory(name):
    """And in little time: some would take hours."""
    data = REFUSED[name]
    tracemalloc.start()
    try:
        result = unpickle(data, "w", PLAIN_GLOBALS)
        assert name == "bytearray of 3 GB" and result.name == "builtins.bytearray"
    except ShardoptError as error:
        assert type(error) in (CorruptionError, FormatError) and "w: found" in str(error)
    finally:
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert used < NOTHING_BIG + 250 * len(data)


def test_as_deep_as_allowed():
    value = None
    for _ in range(MOST_DEPTH):
        value = [value]
    assert unpickle(pickle.dumps(value), "w", {}) == value
    with pytest.raises(FormatError, match="nested too deep"):
        unpickle(pickle.dumps([value]), "w", {})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_damage_is_an_error_or_another_value(protocol):
    value = {
        "a": [1, 300, 2**70, None, True],
        "b": {"c": (1.5, "text", b"\xff" * 5)},
        "o": collections.OrderedDict(x=1),
    }
    value["s"] = {1, 2}
    data = pickle.dumps([value, value, Local()], protocol)
    refused = 0
    for place in range(len(data)):
        for changed in (
            data[:place],
            *(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :] for bit in (1, 4, 128)),
        ):
            try:
                unpickle(changed, "w", PLAIN_GLOBALS)
            except ShardoptError:
                refused += 1
    assert refused > 2 * len(data)
