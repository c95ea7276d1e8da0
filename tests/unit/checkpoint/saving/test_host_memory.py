"""Host memory that saves in the background copy to, and the streams that threads work on; GPUs are stood in for."""

import ctypes
import mmap
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardopt.checkpoint.saving.writing.earlier import Kept
from shardopt.checkpoint.saving.writing.staging import Copy, Staging
from shardopt.runtime import accelerator as accelerators
from shardopt.runtime import host_memory
from shardopt.runtime.host_memory import Block, HostMemory

MIB = 1 << 20


def test_it_is_allocated_once_and_grows_only_for_more():
    memory = HostMemory()
    state = {
        "a": torch.randn(1000),
        "b": torch.arange(7, dtype=torch.int8),
        "c": torch.randn(30, 40).T,
        "d": torch.ones(()),
    }

    def staged(app, lazily=False):
        staging = Staging(app, memory, lazily)
        staging.finish()
        views = staging.describe("none").views
        return {key: view.pieces[0].tensor for key, view in views.items()}

    first = staged(state)
    assert all(torch.equal(first[key], state[key]) for key in state)
    assert all(host.is_contiguous() and host.data_ptr() % 64 == 0 for host in first.values())
    block = memory._plain.memory.data_ptr()
    again = staged({key: tensor + 1 for key, tensor in state.items()})
    assert [again[key] is first[key] for key in state] == [True] * 4
    smaller = staged(
        {"c": torch.ones(50, dtype=torch.bfloat16), "e": torch.zeros(0, 3), "f": torch.ones(2, dtype=torch.bool)}
    )
    assert memory._plain.memory.data_ptr() == block
    assert smaller["c"].dtype == torch.bfloat16 and smaller["e"].shape == (0, 3) and bool(smaller["f"].all())
    larger = staged({"a": torch.ones(100_000)})
    assert memory._plain.memory.nbytes == 400_000 + mmap.PAGESIZE and bool((larger["a"] == 1).all())
    memory.free()
    assert memory._plain.memory.nbytes == 0
    assert torch.equal(staged(state)["c"], state["c"])
    assert memory._pinned.memory.nbytes == 0


def mapping_of(tensor):
    """The fields of the mapping of a tensor's memory in /proc/self/smaps, by name; None where there is none."""
    fields, address = None, tensor.data_ptr()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            begin, end = (int(each, 16) for each in name.split("-"))
            if fields is not None:
                return fields
            fields = {} if begin <= address < end else None
        elif fields is not None:
            fields[name.rstrip(":")] = rest.split()
    return fields


def share_there(tensor):
    """The share of a tensor's pages that are in memory. Not by its mapping, which may be one with what is beside it."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE
    there = (ctypes.c_ubyte * count)()
    asked = ctypes.c_void_p(begin), ctypes.c_size_t(count * mmap.PAGESIZE)
    assert ctypes.CDLL(None, use_errno=True).mincore(*asked, there) == 0
    return sum(each & 1 for each in there) / count


def test_pages_are_made_at_once_and_before_they_are_touched():
    block = Block(8 * MIB)
    assert share_there(block.memory) == 0
    block.populate()
    assert share_there(block.memory) == 1
    assert {"hg", "dc"} <= set(mapping_of(block.memory)["VmFlags"])  # large pages, and not copied to children


def test_without_a_way_to_make_them_at_once_they_are_made_when_touched(monkeypatch):
    monkeypatch.setattr(host_memory, "_madvise", None)
    block = Block(MIB)
    block.populate()
    assert share_there(block.memory) == 0
    assert not block.memory.fill_(3).ne(3).any()


def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0) == (child, 0)


def test_a_forked_child_has_none_of_it_and_can_make_its_own():
    memory = HostMemory()
    app = {"x": torch.arange(1000.0)}
    staged = Staging(app, memory, lazily=False)
    old = memory._plain.memory

    def child():
        nothing = mapping_of(old) is None
        fresh = Staging(app, memory, lazily=False)
        fresh.finish()
        (host,) = [view.pieces[0].tensor for view in fresh.describe("none").views.values()]
        return nothing and torch.equal(host, app["x"])

    in_child(child)
    staged.finish()
    assert mapping_of(old) is not None
    assert torch.equal(old[:4000].view(torch.float32), app["x"])


def test_a_forked_child_compares_with_nothing_that_its_parent_has_kept():
    """A publisher in a child used to end by a signal, as it read memory that is not there."""
    kept, request = Kept(), SimpleNamespace(key="x", box=None)
    kept.begin()
    kept.end("saved", [(request, torch.ones(3))])
    in_child(lambda: kept.of("saved", request) is None and kept.memory is None)
    assert kept.of("saved", request) is not None


def test_what_is_given_back_takes_no_memory_though_someone_still_has_it():
    """As a traceback may have, of a write that has failed."""
    memory = HostMemory()
    kept = memory.tensors_like([torch.empty(8 * MIB, dtype=torch.uint8)])[0]
    memory.populate()
    assert share_there(kept) == 1
    memory.give_back()
    assert share_there(kept) == 0


# As far as it can be told without a GPU.


class FakeRuntime:
    """The functions of the CUDA runtime that pin host memory."""

    def __init__(self):
        self.pinned, self.code, self.device = {}, 0, None

    @contextmanager
    def on(self, device):
        self.device = device
        yield
        self.device = None

    def cudaHostRegister(self, address, nbytes, flags):
        assert self.device == torch.device("cuda:3")  # or the thread's device 0 would get a context
        if self.code == 0:
            self.pinned[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address):
        assert self.device == torch.device("cuda:3")
        del self.pinned[address]


@pytest.fixture
def runtime(monkeypatch):
    runtime = FakeRuntime()
    module = SimpleNamespace(cudart=lambda: runtime, device=runtime.on)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return runtime


def like(shape, is_cuda):
    """A stand-in for a tensor that may be on a GPU."""
    tensor = torch.empty(shape)
    device = torch.device("cuda:3" if is_cuda else "cpu")
    return SimpleNamespace(
        dtype=tensor.dtype, shape=tensor.shape, device=device, numel=tensor.numel, element_size=tensor.element_size
    )


def test_only_what_comes_from_a_gpu_is_pinned(runtime):
    memory = HostMemory()
    hosts = memory.tensors_like([like(100, False), like(300, True), like(50, False), like(20, True)])
    assert runtime.pinned == {}  # not yet, as this takes longer than to copy
    memory.populate()
    pinned, plain = memory._pinned.memory, memory._plain.memory
    assert runtime.pinned == {pinned.data_ptr(): pinned.nbytes} and pinned.nbytes == 1200 + 16 + 80
    for host, block in zip(hosts, (plain, pinned, plain, pinned), strict=True):
        assert block.data_ptr() <= host.data_ptr() and host.data_ptr() + host.nbytes <= block.data_ptr() + block.nbytes
    # What the CPU has more of makes nobody pin anew.
    memory.tensors_like([like(100_000, False), like(300, True)])
    memory.populate()
    assert runtime.pinned == {pinned.data_ptr(): pinned.nbytes}
    assert memory._pinned.memory is pinned and memory._plain.memory is not plain


def test_what_is_freed_while_a_save_writes_it_stays_as_it_was():
    """A Manager that is closed by an interrupt frees its memory, and the save in its thread continues with it."""
    memory = HostMemory()
    source = torch.full((1_000_000,), 7.0)
    for of in (memory, memory.later):
        (host,) = of.tensors_like([source])
        of.populate()
        host.copy_(source)
    (first,), (later,) = memory.tensors_like([source]), memory.later.tensors_like([source])
    memory.free()
    assert torch.equal(first, source) and torch.equal(later, source)


def test_pinned_memory_is_let_go_before_it_is_freed(runtime):
    memory = HostMemory()
    for size in (1000, 2000):
        memory.tensors_like([like(size, True)])
        memory.populate()
        assert runtime.pinned == {memory._pinned.memory.data_ptr(): memory._pinned.memory.nbytes}
    memory.free()
    assert runtime.pinned == {}
    memory.tensors_like([like(1000, True)])
    memory.populate()
    in_child(lambda: len(runtime.pinned) == 1)  # nothing was done about the parent's
    del memory
    assert runtime.pinned == {}


def test_memory_that_cannot_be_pinned_is_used_as_it_is_with_one_warning(runtime, caplog):
    runtime.code = 2
    accelerators._warn_of_pageable.cache_clear()
    memory = HostMemory()
    for size in (10, 1_000_000):
        (host,) = memory.tensors_like([like(size, True)])
        memory.populate()
        host.fill_(1)
    assert runtime.pinned == {}
    memory.free()
    assert [record.getMessage() for record in caplog.records] == [
        "host memory cannot be pinned (error 2 of the driver; see ulimit -l): copies to it take longer [no-space]"
    ]


class FakeStream:
    def __init__(self, accelerator, device, name):
        self._accelerator, self.device, self.name = accelerator, device, name

    def synchronize(self):
        self._accelerator.note("synchronize", self.name)

    def wait_stream(self, other):
        self._accelerator.note("wait", self.name, other.name)


class FakeAccelerator:
    """A stand-in for the module of an accelerator; notes what each thread does, and on which device and stream."""

    def __init__(self):
        self.local, self.noted = threading.local(), []

    def note(self, *what):
        at = getattr(self.local, "device", torch.device("cuda:0")), getattr(self.local, "stream", "default")
        self.noted.append((threading.current_thread() is threading.main_thread(), *at, *what))

    def current_stream(self, device):
        return FakeStream(self, device, f"current of {device}")

    def Stream(self, device):
        return FakeStream(self, device, f"for copies of {device}")

    @contextmanager
    def device(self, device):
        before = getattr(self.local, "device", torch.device("cuda:0"))
        self.local.device = device
        yield
        self.local.device = before

    @contextmanager
    def stream(self, stream):
        assert self.local.device == stream.device  # or leaving it would wake up another device
        self.local.stream = stream.name
        yield
        assert self.local.device == stream.device
        self.local.stream = "default"

    def synchronize(self, device=None):
        raise AssertionError("of the whole device")


@pytest.fixture
def accelerator(monkeypatch):
    accelerator = FakeAccelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: accelerator)
    monkeypatch.setattr(accelerators, "_copy_streams", {})
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *args, **kwargs: accelerator.note("copy", len(args[0])))
    return accelerator


def on(device):
    return SimpleNamespace(
        device=torch.device(device),
        is_cpu=device == "cpu",
        numel=lambda: 1,
        is_inference=lambda: True,
        is_contiguous=lambda: True,
    )


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_thread_that_copies_sets_the_device_before_the_stream_and_waits_for_its_stream_alone(accelerator):
    memory, device = HostMemory(), torch.device("cuda:1")
    lazy = Staging({"x": torch.ones(2)}, memory, lazily=False)
    lazy._devices = {device}
    lazy._later = [Copy("a", on("cuda:1"), torch.ones(1), 0), Copy("b", on("cuda:1"), torch.ones(1), 0)]
    in_thread(lazy.finish)
    stream = "for copies of cuda:1"
    assert accelerator.noted == [
        (False, device, stream, "copy", 2),
        (False, device, stream, "synchronize", stream),
    ]


def test_threads_of_a_load_work_on_the_streams_of_the_caller(accelerator):
    """So that what they write comes after what was asked of these before, and before what is asked afterwards."""
    callers = accelerators.CallersStreams([on("cuda:1"), on("cpu"), on("cuda:1")])

    def work():
        with callers.entered():
            accelerator.note("copy")
        accelerator.note("after")

    in_thread(work)
    assert accelerator.noted == [
        (False, torch.device("cuda:1"), "current of cuda:1", "copy"),
        (False, torch.device("cuda:0"), "default", "after"),
    ]
    with accelerators.CallersStreams([on("cpu")]).entered():
        pass
