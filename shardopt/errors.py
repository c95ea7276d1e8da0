"""The exceptions that shardopt raises.

    ShardoptError
    ├── StateError            (ValueError)         state that cannot be keyed, described or stored
    ├── LayoutError           (ValueError)         a placement without a layout; boxes that do not cover a tensor
    ├── MismatchError         (ValueError)         state does not fit what it is loaded into
    ├── OptionError           (ValueError, TypeError)  an argument of the wrong type, or out of its range
    ├── AlgorithmError        (TypeError)          an optimizer that may not run on these parameters
    ├── GradientError         (RuntimeError)       a gradient that does not fit its parameter
    ├── InputError            (ValueError)         ids that a table cannot look up; tables that no plan fits
    ├── PartialLoadError      (RuntimeError)       a step or save of an optimizer that is half changed
    ├── RankError             (RuntimeError)       a rank failed, died or did not arrive
    └── CheckpointError       (RuntimeError)
        ├── CheckpointNotFoundError  (FileNotFoundError)   no committed checkpoint at this path
        ├── CheckpointExistsError    (FileExistsError)     a committed checkpoint stands at this path, or a later step
        ├── CorruptionError                                bytes that are not what was written
        │   └── UnreadableError                            bytes that a disk does not give back
        ├── FormatError                                    a checkpoint that this version cannot read
        └── NoSpaceError                                   no room where a checkpoint was to go

Each error has a code (`codes.py`), in brackets at the end of its first line: that of its class, or a finer one that
is given where it is raised. Errors and problems say no secrets of URLs (`redaction.py`). Every error can cross the wire
as JSON (`to_json`, `from_json`), so that all ranks raise the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from shardopt.codes import CODES, Code
from shardopt.redaction import redacted


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault, described so that it can be fixed without a debugger.

    Args:
        key: where it is: a key, an option, a path.
        found: what is there.
        required: what would do.
        remedy: what to do about it.
    """

    key: str
    found: str
    required: str
    remedy: str

    def __post_init__(self) -> None:
        for name in ("key", "found", "required", "remedy"):
            text = getattr(self, name)
            if "://" in text:
                object.__setattr__(self, name, redacted(text))

    def __str__(self) -> str:
        return f"{self.key}: found {self.found}; required {self.required}; {self.remedy}"


class ShardoptError(Exception):
    """The base of all errors of this package.

    Args:
        message: what happened, in one sentence.
        problems: each thing that is wrong; all of them are kept, and the first ones printed.
        left_out: how many more there are by what is to be done about them, where the error came from other ranks,
            of very many, which send no more than the first ones. What several of them have alike may count more than
            once.
        code: the cause, for `shardopt explain CODE`; None for that of the class.

    Attributes:
        code: the cause, one of `shardopt.codes.CODES`.
    """

    code: Code = "internal"
    most_problems_in_message = 200

    def __init__(
        self,
        message: str,
        problems: Iterable[Problem] = (),
        left_out: Mapping[str, int] = MappingProxyType({}),
        *,
        code: Code | None = None,
    ) -> None:
        self.code = code or type(self).code
        self.message = redacted(message)
        super().__init__(self.message)
        self.problems = tuple(problems)
        self.left_out = dict(left_out)

    def __str__(self) -> str:
        first, *others = self.message.split("\n")
        lines = [f"{first} [{self.code}]", *others]
        lines += [f"  - {problem}" for problem in self.problems[: self.most_problems_in_message]]
        left_out = len(self.problems) - self.most_problems_in_message
        if left_out > 0:
            lines.append(f"  ... and {left_out} more (see .problems)")
        lines += [f"  ... and {count} more that ranks have met: {remedy}" for remedy, count in self.left_out.items()]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message, self.problems, self.left_out), {"code": self.code})

    def restate(self, message: str) -> None:
        """Replaces the message, as by one that says more."""
        self.message = message
        self.args = (message,)

    def to_json(self) -> dict[str, Any]:
        wire = {
            "type": type(self).__name__,
            "code": self.code,
            "message": self.message,
            "problems": [asdict(problem) for problem in self.problems],
        }
        return {**wire, "left_out": self.left_out} if self.left_out else wire

    @staticmethod
    def from_json(wire: Mapping[str, Any]) -> ShardoptError:
        """Makes the error that `to_json` encoded.

        A type that this version does not know becomes a `RankError`; a code that it does not know, that of the type.
        """
        kind = _BY_NAME.get(str(wire["type"]), RankError)
        problems = [Problem(**problem) for problem in wire["problems"]]
        code = wire.get("code") if wire.get("code") in CODES else None
        return kind(str(wire["message"]), problems, wire.get("left_out", {}), code=code)


class StateError(ShardoptError, ValueError):
    """State cannot be keyed, described or stored."""

    code: Code = "cannot-store"


class LayoutError(ShardoptError, ValueError):
    """A tensor's placement has no layout, or boxes do not cover a tensor exactly once."""

    code: Code = "bad-layout"


class MismatchError(ShardoptError, ValueError):
    """State to be loaded does not fit the objects that it is for. Nothing was changed."""

    code: Code = "does-not-fit"
    most_problems_in_message = 20  # of thousands of names: enough to see what has become of them


class OptionError(ShardoptError, ValueError, TypeError):
    """Arguments are of the wrong type or out of range; each is named, and nothing was begun."""

    code: Code = "invalid-argument"


class AlgorithmError(ShardoptError, TypeError):
    """An optimizer is unknown here, or would compute something else on shards."""

    code: Code = "unsupported-algorithm"


class GradientError(ShardoptError, RuntimeError):
    """A gradient's shape, dtype or placement is not its parameter's."""

    code: Code = "gradient-mismatch"


class InputError(ShardoptError, ValueError):
    """A table cannot look up ids, offsets or weights, and no rank looked up anything; or no plan of tables fits."""

    code: Code = "embedding-tables"


class PartialLoadError(ShardoptError, RuntimeError):
    """An optimizer was to be stepped or saved that a load, or an outer step, may have left half changed."""

    code: Code = "partial-load"


class RankError(ShardoptError, RuntimeError):
    """A rank failed, died, or did not arrive in time; the message names it."""

    code: Code = "rank-lost"


class CheckpointError(ShardoptError, RuntimeError):
    """A checkpoint could not be written or read."""

    code: Code = "storage-failed"


class NoSpaceError(CheckpointError):
    """The destination has no room for a checkpoint, or for a part of one."""

    code: Code = "no-space"


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at the path."""

    code: Code = "no-checkpoint"


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A committed checkpoint is already at the path, and is never overwritten."""

    code: Code = "path-taken"


class CorruptionError(CheckpointError):
    """Stored bytes differ from what was written; the error names file, key and segment."""

    code: Code = "damaged"


class UnreadableError(CorruptionError):
    """A disk fails to return stored bytes that certainly exist."""


class FormatError(CheckpointError):
    """The checkpoint asks for a newer reader, or is not one of ours."""

    code: Code = "unknown-format"


def _tree(kind: type[ShardoptError]) -> Iterable[type[ShardoptError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


_BY_NAME = {kind.__name__: kind for kind in _tree(ShardoptError)}
