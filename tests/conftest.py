"""Options of the whole test suite."""

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

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


def pytest_collection_finish() -> None:
    _keep_out_of_collections()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
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
