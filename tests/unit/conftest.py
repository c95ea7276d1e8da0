"""What holds for all tests of one process."""

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_test_ends_the_worker() -> Iterator[None]:
    """A Manager that got a signal ends its process after a time, and another test may run by then."""
    yield
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer) and thread.name == "shardopt-stop":
            thread.cancel()
