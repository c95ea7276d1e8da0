"""Locks of modules in a forked child: a thread of the parent, which the child does not have, may hold one."""

import importlib
import os

import pytest

MODULES = [
    "runtime.deferred_checks",
    "runtime.gc_pause",
    "ranks.connections.unauthenticated",
    "checkpoint.sources.open",
    "checkpoint.sources.referred",
]


@pytest.mark.parametrize("name", MODULES)
def test_no_lock_of_a_module_stays_held_in_a_child(name):
    module = importlib.import_module(f"shardopt.{name}")
    with module._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if module._lock.acquire(blocking=False) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
