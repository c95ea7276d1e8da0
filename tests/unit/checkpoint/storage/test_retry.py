"""Requests that are asked again, and those that are not."""

import errno
import random
import threading
import time

import pytest

from shardopt.checkpoint.storage.retry import Requests, RetryPolicy, is_transient, run_in_thread
from shardopt.errors import CheckpointError, CorruptionError
from shardopt.world import using
from tests.harness.planned_fs import PlannedFileSystem
from tests.support.worlds import FakeClock

QUICK = RetryPolicy(attempts=3, pause_seconds=0.01, request_seconds=0.2)


class HTTPError(Exception):
    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status = status


class IncompleteRead(Exception):
    """As urllib3 has it, by name."""


PASSING = [
    TimeoutError("slow"),
    ConnectionResetError("reset"),
    BrokenPipeError("gone"),
    OSError(errno.EBUSY, "SlowDown"),
    OSError(errno.EIO, "InternalError"),
    OSError("without a number"),
    HTTPError(503),
    HTTPError(429),
    IncompleteRead("half"),
]
LASTING = [
    FileNotFoundError("none"),
    PermissionError("AccessDenied"),
    FileExistsError("there"),
    OSError(errno.ENOSPC, "full"),
    OSError(errno.EINVAL, "400"),
    NotImplementedError("no such operation"),
    HTTPError(403),
    HTTPError(400),
    ValueError("a mistake"),
    CorruptionError("ours"),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_may_pass_is_tried_until_it_has(error):
    errors = [error, error]

    def sometimes():
        if errors:
            raise errors.pop()
        return 7

    assert is_transient(error)
    assert Requests(PlannedFileSystem(), QUICK).repeat("do", sometimes) == 7


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_what_will_not_pass_is_told_at_once(error):
    calls = []

    def never():
        calls.append(1)
        raise error

    with pytest.raises((CheckpointError, FileNotFoundError, FileExistsError)) as caught:
        Requests(PlannedFileSystem(), QUICK).repeat("read s3://b/a", never)
    assert len(calls) == 1
    if isinstance(error, PermissionError):
        assert "cannot read s3://b/a" in str(caught.value) and "give credentials that" in str(caught.value)
    if isinstance(error, FileNotFoundError | FileExistsError | CorruptionError):
        assert caught.value is error


def test_patience_ends_with_an_error_that_says_what_to_do():
    storage = PlannedFileSystem(OSError(errno.EBUSY, "SlowDown"), times=99)
    begin = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        Requests(storage, QUICK).call("read planned://a/b", "cat_file", "/a/b")
    assert len(storage.asked) == 3
    assert time.monotonic() - begin < 5
    message = str(caught.value)
    for part in ("cannot read planned://a/b", "3 attempts within", "SlowDown", "see whether the store can be reached"):
        assert part in message
    assert isinstance(caught.value.__cause__, OSError)


def test_pauses_double_up_to_the_longest():
    policy = RetryPolicy(attempts=6, pause_seconds=1.0, longest_pause_seconds=5.0)
    with using(FakeClock()) as clock, pytest.raises(CheckpointError):
        Requests(PlannedFileSystem(TimeoutError(), times=99), policy).call("x", "info", "/a")
    assert clock.pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


@pytest.mark.parametrize(("commits", "seconds"), [(False, 6), (True, 31)])
def test_a_commit_is_tried_for_longer(commits, seconds):
    policy = RetryPolicy(attempts=4, pause_seconds=1.0, longest_pause_seconds=5.0, commit_seconds=30)

    def fail():
        clock.now += 0.25
        raise TimeoutError

    with using(FakeClock()) as clock, pytest.raises(CheckpointError, match="attempts within"):
        Requests(PlannedFileSystem(), policy).repeat("x", fail, commits)
    assert sum(clock.pauses) == pytest.approx(seconds, abs=4)


def test_a_retry_draws_none_of_the_programs_random_numbers():
    random.seed(0)
    expected = random.random()
    random.seed(0)
    Requests(PlannedFileSystem(TimeoutError(), times=1), QUICK).call("x", "info", "/")
    assert random.random() == expected


def test_a_request_without_an_answer_is_abandoned_and_made_again():
    storage = PlannedFileSystem("hang", seconds=2.0, operations=["info"])
    storage.pipe_file("/a", b"12")
    begin = time.monotonic()
    assert Requests(storage, QUICK).call("look at a", "info", "/a")["size"] == 2
    assert 0.2 <= time.monotonic() - begin < 1.5
    assert storage.asked[-2:] == [("info", "/a")] * 2


def test_a_thread_gives_what_its_function_returns_or_raises():
    assert run_in_thread(lambda: threading.current_thread().name).result() == "shardopt-request"
    with pytest.raises(ZeroDivisionError):
        run_in_thread(lambda: 1 // 0).result()
