"""The shipped contract of storage finds each broken promise, in a storage that keeps all others."""

import re
import time
from contextlib import contextmanager
from functools import partial
from itertools import count

import pytest

from shardopt.checkpoint.storage import FLUSH, Storage, register_storage, too_short
from shardopt.testing import storage as contract

NUMBERS = count()
FILES = {}  # all of a process


class Held(Storage):
    """Files in a dict, by URL."""

    def __init__(self, url):
        self.url, self.files = url, FILES

    def names(self):
        below = f"{self.url}/"
        return sorted({path.removeprefix(below).split("/")[0] for path in [*self.files] if path.startswith(below)})

    def size(self, name):
        return len(self.read(name))

    def read(self, name, begin=0, end=None):
        try:
            return self.files[f"{self.url}/{name}"][begin:end]
        except KeyError:
            raise FileNotFoundError(name) from None

    @contextmanager
    def opened(self, name):
        yield partial(self.fill, name)

    def fill(self, name, spans):
        data = self.read(name)
        for offset, memory in spans:
            if offset + memory.nbytes > len(data):
                raise too_short(name, len(data))
            memory[:] = data[offset : offset + memory.nbytes]

    def write(self, name, buffers):
        data = bytearray()
        for buffer in buffers:
            data += buffer
        self.publish(name, bytes(data))
        return len(data)

    def publish(self, name, data):
        self.files[f"{self.url}/{name}"] = data

    def publish_new(self, name, data):
        if self.files.setdefault(f"{self.url}/{name}", data) != data:
            raise FileExistsError(name)
        return True

    def remove(self, name):
        self.files.pop(f"{self.url}/{name}", None)

    def child(self, name):
        return type(self)(f"{self.url}/{name}")

    def parent(self):
        above, _, name = self.url.rpartition("/")
        return type(self)(above), name

    def make(self):
        pass

    remove_if_empty = make


def failures_of(kind):
    """Returns the names of the checks that fail."""
    register_storage("held", kind)
    try:
        contract.check_storage(lambda: kind(f"held://{next(NUMBERS)}"))
    except AssertionError as error:
        return re.findall(r"^  (\w+): (?:.*(?:found|Error).*)", str(error), re.MULTILINE)
    return []


def test_a_storage_that_keeps_its_promises_passes():
    assert failures_of(Held) == []


class ReadsNoRanges(Held):
    def read(self, name, begin=0, end=None):
        return super().read(name)[begin:] if end is None else super().read(name)[begin : end - 1]


class LosesEmptyFiles(Held):
    def publish(self, name, data):
        if data:
            super().publish(name, data)


class KeepsBuffers(Held):
    def write(self, name, buffers):
        data = b"".join([buffer for buffer in buffers if buffer is not FLUSH])
        self.publish(name, data)
        return len(data)


class EndsAtABlock(Held):
    def publish(self, name, data):
        super().publish(name, data[: 16 << 20])


class SwapsParts(Held):
    def publish(self, name, data):
        part = 5 << 20
        super().publish(name, data if len(data) < 3 * part else data[part : 2 * part] + data[:part] + data[2 * part :])


class ReadsByOneAtATime(Held):
    def fill(self, name, spans):
        self.busy = not getattr(self, "busy", False)
        time.sleep(0.001)
        if not self.busy:
            raise OSError("busy")
        super().fill(name, spans)
        self.busy = False


class FillsTheFirst(Held):
    def fill(self, name, spans):
        super().fill(name, spans[:1])


class ReadsPastTheEnd(Held):
    def fill(self, name, spans):
        data = self.read(name)
        for offset, memory in spans:
            memory[:] = data[offset : offset + memory.nbytes].ljust(memory.nbytes, b"\0")


class ThinksFoldersAreFiles(Held):
    def size(self, name):
        return 0 if name in self.names() and f"{self.url}/{name}" not in self.files else super().size(name)


class RaisesAtARemoval(Held):
    def remove(self, name):
        del self.files[f"{self.url}/{name}"]


class RaisesKeyError(Held):
    def read(self, name, begin=0, end=None):
        return self.files[f"{self.url}/{name}"][begin:end]


class KeepsListings(Held):
    def names(self):
        return self.files.setdefault(f"listing of {self.url}", super().names())


class ListsUnsorted(Held):
    def names(self):
        return super().names()[::-1]


class QuotesNames(Held):
    def child(self, name):
        return super().child(name.partition("#")[0])


class HasNoParent(Held):
    def parent(self):
        return None


class RemovesWhatIsNotEmpty(Held):
    def remove_if_empty(self):
        for name in self.names():
            self.remove(name)


class PublishesInTwoSteps(Held):
    def publish(self, name, data):
        super().publish(name, data[: len(data) // 2])
        time.sleep(0.001)
        super().publish(name, data)


class LeavesATemporaryFile(Held):
    def write_atomically(self, name, buffers):
        self.publish(f".{name}.tmp", b"")
        return self.write(name, buffers)


class PublishesOver(Held):
    def publish_new(self, name, data):
        self.publish(name, data)
        return True


class RefusesItsOwn(Held):
    def publish_new(self, name, data):
        if self.exists(name):
            raise FileExistsError(name)
        self.publish(name, data)
        return True


class LooksBeforeItWrites(Held):
    def publish_new(self, name, data):
        if self.exists(name) and self.read(name) != data:
            raise FileExistsError(name)
        time.sleep(0.01)
        self.publish(name, data)
        return True


class SaysNothing(Held):
    def publish_new(self, name, data):
        super().publish_new(name, data)


class HasASlash(Held):
    def __init__(self, url):
        super().__init__(url)
        self.url = f"{url}/"


class IsElsewhere(Held):
    def __init__(self, url):
        super().__init__(url)
        self.files = {}

    def child(self, name):
        made = super().child(name)
        made.files = self.files
        return made

    def parent(self):
        above, name = super().parent()
        above.files = self.files
        return above, name


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (ReadsNoRanges, contract.what_is_written_is_read),
        (LosesEmptyFiles, contract.empty_files_and_many_buffers),
        (KeepsBuffers, contract.memory_of_buffers_is_used_again),
        (EndsAtABlock, contract.large_files),
        (SwapsParts, contract.large_files),
        (ReadsByOneAtATime, contract.large_files),
        (FillsTheFirst, contract.spans_are_filled),
        (ReadsPastTheEnd, contract.a_file_that_ends_too_soon_is_corrupt),
        (ThinksFoldersAreFiles, contract.what_is_not_there),
        (RaisesAtARemoval, contract.what_is_not_there),
        (RaisesKeyError, contract.what_is_not_there),
        (KeepsListings, contract.names_change_at_once),
        (ListsUnsorted, contract.directories),
        (QuotesNames, contract.directories),
        (HasNoParent, contract.directories),
        (RemovesWhatIsNotEmpty, contract.directories),
        (PublishesInTwoSteps, contract.published_over_what_was_there),
        (LeavesATemporaryFile, contract.published_over_what_was_there),
        (PublishesOver, contract.published_only_where_nothing_is),
        (RefusesItsOwn, contract.published_only_where_nothing_is),
        (SaysNothing, contract.published_only_where_nothing_is),
        (LooksBeforeItWrites, contract.one_of_many_publishes),
        (HasASlash, contract.its_url_opens_it),
        (IsElsewhere, contract.its_url_opens_it),
    ],
    ids=lambda each: each.__name__,
)
def test_a_broken_promise_is_found(kind, check):
    assert check.__name__ in failures_of(kind)


def test_every_check_finds_a_storage_that_breaks_its_promise():
    (parameters,) = test_a_broken_promise_is_found.pytestmark
    assert {check for _, check in parameters.args[1]} == {*contract.CHECKS}


class HasAKey(Held):
    def __init__(self, url, key=None):
        super().__init__(url)
        self.key = key

    def child(self, name):
        return HasAKey(f"{self.url}/{name}", self.key)

    def parent(self):
        above, _, name = self.url.rpartition("/")
        return HasAKey(above, self.key), name

    def names(self):
        if self.key != "secret":
            raise PermissionError("no key")
        return super().names()


def test_options_reach_what_opens_it_again():
    def make():
        return HasAKey(f"held://{next(NUMBERS)}", "secret")

    register_storage("held", HasAKey)
    contract.check_storage(make, storage_options={"key": "secret"})
    with pytest.raises(AssertionError, match=r"its_url_opens_it: PermissionError: no key"):
        contract.check_storage(make)


def test_all_that_fails_is_named_with_what_was_found():
    register_storage("held", FillsTheFirst)
    with pytest.raises(AssertionError) as caught:
        contract.check_storage(lambda: FillsTheFirst(f"held://{next(NUMBERS)}"))
    first, *lines = str(caught.value).splitlines()
    assert first == f"{len(lines)} of {len(contract.CHECKS)} checks failed:"
    assert any(re.match(r"  spans_are_filled: what spans .* have: found .*, required .*", line) for line in lines)
