"""Files are not flushed to the disk in the processes of tests: no machine goes down during one.

A file and its directory take 0.6 ms on a fast disk, half of it of the processor. What is flushed, and when, is seen by
the calls, which stay: tests count them and make them fail.
Programs that a test starts with an interpreter of their own flush as ever, and so does all under `--exhaustive`.
"""

import os

flush = os.fsync
_VARIABLE = "SHARDOPT_TESTS_LEAVE_UNFLUSHED"


def leave_unflushed() -> None:
    """Has `os.fsync` of this process, and of the fork server that it starts, do nothing for an open descriptor."""
    os.environ[_VARIABLE] = "1"
    os.fsync = _checked


def leave_unflushed_as_parent() -> None:
    """Does so if the process has that started this one."""
    if _VARIABLE in os.environ:
        leave_unflushed()


def _checked(fd: int) -> None:
    os.fstat(fd)
