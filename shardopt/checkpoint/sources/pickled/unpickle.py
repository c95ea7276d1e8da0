"""Interprets pickles without running anything: makes plain values, and objects of the caller's stand-ins.

A pickle is a program for a machine with a stack. This one has the operations of protocols 2 to 5, and no way to reach
anything by name: a global is what the caller's table has under its name, or else an `Unknown`, of which any use gives
another `Unknown`. Bytes may come from anybody. So nothing is allocated that the bytes do not bear out: lengths are
compared with what is left, arguments of stand-ins are counted, keys whose hashes collide are counted, and results that
are nested too deep, hold themselves, or would be far larger written out than the pickle (it can refer to one list many
times) are refused. What is made takes at most a few hundred bytes for each byte of the pickle.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any

from shardopt.checkpoint.format.constants import damaged
from shardopt.checkpoint.sources.pickled.bounds import Keys, check_result
from shardopt.checkpoint.sources.pickled.stand_ins import ByteArray, Known, StandIn, Unknown, settled, text_of
from shardopt.errors import FormatError, Problem, ShardoptError
from shardopt.runtime.gc_pause import gc_paused

_LATEST_PROTOCOL = 5
_PYTHON_2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # protocol 2 has the names of that time
_MOST_NAME_CHARACTERS = 1000
_MOST_GLOBALS = 4096
_MOST_ARGUMENTS_PER_BYTE = 4
_SPARE_ARGUMENTS = 4096
_UNSIGNED_2, _UNSIGNED_4 = struct.Struct("<H").unpack_from, struct.Struct("<I").unpack_from
_SIZED = (str, bytes, list, tuple, dict, set, ByteArray)


def unpickle(
    data: bytes,
    where: str,
    known: Mapping[str, Callable[..., Any] | Any],
    persistent: Callable[[Any], Any] | None = None,
    attributes: list[tuple[dict[Any, Any], Any]] | None = None,
) -> Any:
    """Returns the object that a pickle describes. Imports, looks up and calls only what `known` has.

    Args:
        data: the pickle, from any source.
        where: names it in errors.
        known: by "module.qualname" what stands for a global. A callable is called with the arguments that the pickle
            has for its global, and may raise TypeError, ValueError or LookupError for those that it does not take;
            what it returns gets state, if the pickle has any, when it is a `StandIn`. Anything else is the value of
            its global. A mapping whose `__missing__` raises refuses what it does not have.
        persistent: called with each persistent id, as known callables are; without it a pickle with one is refused.
        attributes: gets each dict that has some, and these.

    Returns:
        None, bool, int, float, str, bytes, list, tuple, dict and set as they were, what `known` and `persistent`
        returned, and an `Unknown` for all else. Nothing holds itself, or is nested deeper than `bounds.MOST_DEPTH`.

    Raises:
        CorruptionError: the bytes are no pickle.
        FormatError: an opcode of other protocols, or a result beyond the bounds.
    """
    machine = _Machine(data, where, known, persistent)
    with gc_paused():  # objects by the hundred thousand, none of them garbage
        try:
            result = machine.run()
        except ShardoptError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
            fault = f"no valid pickle ({type(error).__name__} at byte {machine.at})"
            raise damaged(where, fault) from error
        check_result(result, len(data), where)
    if attributes is not None:
        attributes += machine.attributes
    return result


class _Stop(Exception):
    """The pickle has ended."""


class _Machine:
    """The stack and the memo, with a method for each opcode that does more than push a value."""

    def __init__(
        self, data: bytes, where: str, known: Mapping[str, Any], persistent: Callable[[Any], Any] | None
    ) -> None:
        self.data = data
        self.where = where
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.known = known
        self.persistent = persistent
        self.globals: dict[tuple[str, str], Any] = {}
        self.attributes: list[tuple[dict[Any, Any], Any]] = []
        self.keys = Keys(len(data))
        self.arguments_left = _SPARE_ARGUMENTS + _MOST_ARGUMENTS_PER_BYTE * len(data)

    def run(self) -> Any:
        data, operations = self.data, _OPERATIONS
        try:
            while True:
                code = data[self.at]
                self.at += 1
                operation = operations[code]
                if operation is None:
                    raise self.refused(code)
                operation(self)
        except _Stop:
            (result,) = self.stack
            if self.at != len(data):
                raise damaged(self.where, f"{len(data) - self.at} bytes after the end of its pickle") from None
            return settled(result)

    def refused(self, code: int) -> ShardoptError:
        name = _NAMES.get(code)
        if name is None:
            return damaged(self.where, f"no valid pickle (byte {code:#x} at {self.at - 1} is no opcode)")
        found, required = f"the opcode {name}", "a pickle of protocol 2 to 5"
        problem = Problem(self.where, found, required, "save it again with torch.save")
        return FormatError("a pickle has an operation that is not read here", [problem])

    # Bytes of the pickle.

    def number_1(self) -> int:
        number = self.data[self.at]
        self.at += 1
        return number

    def number_2(self) -> int:
        (number,) = _UNSIGNED_2(self.data, self.at)
        self.at += 2
        return int(number)

    def number_4(self) -> int:
        (number,) = _UNSIGNED_4(self.data, self.at)
        self.at += 4
        return int(number)

    def number_8(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise ValueError("beyond the end")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def line(self) -> str:
        end = self.data.index(b"\n", self.at, self.at + _MOST_NAME_CHARACTERS)
        taken = self.data[self.at : end].decode()
        self.at = end + 1
        return taken

    # Frame and stack.

    def op_proto(self) -> None:
        protocol = self.number_1()
        if protocol > _LATEST_PROTOCOL:
            problem = Problem(self.where, f"protocol {protocol}", "2 to 5", "save it again with torch.save")
            raise FormatError("a pickle is of a newer protocol", [problem])

    def op_frame(self) -> None:
        if self.number_8() > len(self.data) - self.at:
            raise ValueError("a frame beyond the end")

    def op_stop(self) -> None:
        raise _Stop

    def op_mark(self) -> None:
        self.marks.append(len(self.stack))

    def to_mark(self) -> list[Any]:
        """Pops everything above the last mark off the stack."""
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def op_pop(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def op_pop_mark(self) -> None:
        self.to_mark()

    # The memo.

    def op_binput(self) -> None:
        self.memo[self.number_1()] = self.stack[-1]

    def op_long_binput(self) -> None:
        self.memo[self.number_4()] = self.stack[-1]

    def op_memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    # Containers.

    def op_tuple1(self) -> None:
        self.stack[-1] = (self.stack[-1],)

    def op_tuple2(self) -> None:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def op_tuple3(self) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def op_tuple(self) -> None:
        items = self.to_mark()
        self.stack.append(tuple(items))

    def op_append(self) -> None:
        self.extend([self.stack.pop()])

    def op_appends(self) -> None:
        self.extend(self.to_mark())

    def extend(self, items: list[Any]) -> None:
        top = self.stack[-1]
        if type(top) is list:
            top.extend(items)
        elif not isinstance(top, Unknown):
            raise TypeError("items for what is no list")

    def op_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.update([key, value])

    def op_setitems(self) -> None:
        self.update(self.to_mark())

    def update(self, items: list[Any]) -> None:
        top = self.stack[-1]
        if isinstance(top, dict):
            keys = items[::2]
            self.keys.check(keys, top)
            top.update(zip(keys, items[1::2], strict=True))
        elif not isinstance(top, Unknown):
            raise TypeError("entries for what is no dict")

    def op_additems(self) -> None:
        items = self.to_mark()
        top = self.stack[-1]
        if type(top) is set:
            self.keys.check(items, top)
            top.update(items)
        elif not isinstance(top, Unknown):
            raise TypeError("items for what is no set")

    def op_frozenset(self) -> None:
        self.to_mark()
        self.stack.append(Unknown("builtins.frozenset"))

    # Globals, and objects made of them.

    def op_global(self) -> None:
        self.stack.append(self.find(self.line(), self.line()))

    def op_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str or len(module) + len(name) > _MOST_NAME_CHARACTERS:
            raise TypeError("a global without a name")
        self.stack.append(self.find(module, name))

    def find(self, module: str, name: str) -> Any:
        found = self.globals.get((module, name))
        if found is None:
            if len(self.globals) >= _MOST_GLOBALS:
                raise ValueError("globals without end")
            full = f"{_PYTHON_2_MODULES.get(module, module)}.{name}"
            try:
                stand_in = self.known[full]
            except KeyError:
                found = Unknown(full)
            else:
                found = Known(full, stand_in) if callable(stand_in) else stand_in
            self.globals[module, name] = found
        return found

    def op_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], arguments)

    op_newobj = op_reduce

    def op_newobj_ex(self) -> None:
        options = self.stack.pop()
        if type(options) is not dict:
            raise TypeError("arguments by name that are no dict")
        arguments = self.stack.pop()
        top = self.stack[-1]
        self.stack[-1] = Unknown(top.name) if options and isinstance(top, Unknown) else self.call(top, arguments)

    def call(self, function: Any, arguments: Any) -> Any:
        if type(arguments) is not tuple:
            raise TypeError("arguments that are no tuple")
        if type(function) is not Known:
            if isinstance(function, Unknown):
                return Unknown(function.name)
            raise TypeError("a call of what is no global")
        # A stand-in may copy its arguments, and a pickle can hand it the same ones over and over.
        if arguments:
            for argument in arguments:
                if isinstance(argument, _SIZED):
                    self.arguments_left -= len(argument)
            self.arguments_left -= len(arguments)
            if self.arguments_left < 0:
                raise ValueError("more arguments than bytes")
        return function.call(*arguments)

    def op_build(self) -> None:
        state = self.stack.pop()
        top = self.stack[-1]
        if isinstance(top, StandIn):
            top.build(state)
            self.stack[-1] = top.settled()
        elif isinstance(top, dict):
            self.attributes.append((top, state))
        elif not isinstance(top, Unknown):
            raise TypeError("state for what has none")

    def op_binpersid(self) -> None:
        if self.persistent is None:
            raise ValueError("an id of something outside of the pickle")
        self.stack[-1] = self.persistent(self.stack[-1])


_PUSHED: Mapping[str, Callable[[_Machine], Any]] = {
    "NONE": lambda machine: None,
    "NEWTRUE": lambda machine: True,
    "NEWFALSE": lambda machine: False,
    "BININT": lambda machine: int.from_bytes(machine.take(4), "little", signed=True),
    "BININT1": _Machine.number_1,
    "BININT2": _Machine.number_2,
    "LONG1": lambda machine: int.from_bytes(machine.take(machine.number_1()), "little", signed=True),
    "LONG4": lambda machine: int.from_bytes(machine.take(machine.number_4()), "little", signed=True),
    "BINFLOAT": lambda machine: struct.unpack(">d", machine.take(8))[0],
    "SHORT_BINUNICODE": lambda machine: text_of(machine.take(machine.number_1())),
    "BINUNICODE": lambda machine: text_of(machine.take(machine.number_4())),
    "BINUNICODE8": lambda machine: text_of(machine.take(machine.number_8())),
    "SHORT_BINBYTES": lambda machine: machine.take(machine.number_1()),
    "BINBYTES": lambda machine: machine.take(machine.number_4()),
    "BINBYTES8": lambda machine: machine.take(machine.number_8()),
    "BYTEARRAY8": lambda machine: ByteArray(machine.take(machine.number_8())),
    "EMPTY_TUPLE": lambda machine: (),
    "EMPTY_LIST": lambda machine: [],
    "EMPTY_DICT": lambda machine: {},
    "EMPTY_SET": lambda machine: set(),
    "BINGET": lambda machine: settled(machine.memo[machine.number_1()]),
    "LONG_BINGET": lambda machine: settled(machine.memo[machine.number_4()]),
}
"""What opcodes push that only push a value."""


def _pushes(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value(machine))


_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_BY_NAME = {name: _pushes(value) for name, value in _PUSHED.items()}
_BY_NAME |= {name[3:].upper(): method for name, method in vars(_Machine).items() if name.startswith("op_")}
_OPERATIONS = [_BY_NAME.get(_NAMES.get(code, "")) for code in range(256)]
"""By opcode; None where it is none, or none that is interpreted."""
