"""Options of the whole test suite."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import hypothesis
import pytest
from _pytest.runner import runtestprotocol

from tests import fork_server
from tests.support.disk import leave_unflushed

_LONG_SECONDS = 0.1  # that the list of what took longest may have

# Before torch is imported. As many workers of pytest as there are cores would each have as many threads, which wait for
# one another in loops: with tensors as small as those of the tests that takes longer than what they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What is started in the background, or by a service, ignores Ctrl-C, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests make many objects and few cycles: with the usual thresholds the collector takes a twentieth of the time of some.
gc.set_threshold(100_000, 50, 1000)

# No example has a time limit of its own: on a busy machine that would fail a test that is right. Each run draws others,
# so that those of many runs are many: see tests/support/drawn.py.
hypothesis.settings.register_profile("shardopt", deadline=None, max_examples=40)
hypothesis.settings.register_profile("exhaustive", deadline=None, max_examples=100)
hypothesis.settings.load_profile("shardopt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="also run the tests that take minutes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--exhaustive"):
        hypothesis.settings.load_profile("exhaustive")
    else:
        leave_unflushed()
    if version("torch").split(".")[:2] in (["2", "11"], ["2", "12"]):  # which warn also where a call has said so
        config.addinivalue_line("filterwarnings", "ignore:Sparse invariant checks are implicitly disabled:UserWarning")
    if (server := getattr(config, "workerinput", {}).get("fork_server")) is not None:
        fork_server.share(server)


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_configure_node(node: Any) -> None:
    """Before a worker starts: it and the others fork their ranks from one server."""
    fork_server.start()
    node.workerinput["fork_server"] = fork_server.shared()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Makes no items of what is exhaustive, which are more than a third: a second in each worker."""
    yield
    if not metafunc.config.getoption("--exhaustive"):
        usual = [call for call in metafunc._calls if not any(mark.name == "exhaustive" for mark in call.marks)]
        metafunc._calls = usual or metafunc._calls


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Next to nothing that is imported and collected is garbage. The collector would look at it for half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    _keep_out_of_collections()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """In a worker: reports on setup and teardown are left out where nothing is in them.

    There are two of them for each test, which are packed, sent, unpacked and shown to all plugins for nothing.
    """
    if not hasattr(item.config, "workerinput") or item.config.getoption("xmlpath", None):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed or report.sections or report.duration > _LONG_SECONDS:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        if (harness := sys.modules.get("tests.harness.ranks")) is not None:
            harness.end_staying()
        _keep_out_of_collections()


def _keep_out_of_collections() -> None:
    """Keeps what is alive now, the collected tests and what earlier files imported, out of later garbage collections.

    Each of them, and each test that looks for an object, would otherwise walk over a million others.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_root_is_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of roots in the memory of hosts this process knows none before a test, and keeps no connection after it."""
    from shardopt.checkpoint.hosts import served  # which imports torch: see above
    from shardopt.ranks.files.client import FileClient

    monkeypatch.setattr(served, "_roots", {})
    monkeypatch.delenv(served.KEY_FILE, raising=False)
    yield
    for root in served._roots.values():
        for files in root.files:
            if isinstance(files, FileClient):
                files.close()
