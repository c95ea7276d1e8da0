"""Synchronous saves from an accelerator: two buffers in turn, in the order of streams, and bounded."""

import shutil
import tempfile
from unittest import mock

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.saving.writing import device_stream, unchanged
from shardopt.checkpoint.storage import FLUSH, local
from shardopt.errors import CheckpointError, CorruptionError
from shardopt.runtime import host_memory
from tests.accelerator.support import needs_standin, on_accelerator

pytestmark = needs_standin

BUFFER = 2 << 18  # two segments


def state():
    """Small ones, one of several buffers, one that is not contiguous, empty ones, and numbers of the host between."""
    made = {f"small{i}": torch.randn(50 + i) for i in range(60)}
    made |= {f"counter{i}": torch.tensor(float(i)) for i in range(60)}
    made["large"] = torch.randn(700, 500)
    made["turned"] = torch.randn(300, 200).t()
    made["large and turned"] = torch.randn(500, 700).t()
    made["half"] = torch.randn(99).bfloat16()
    made["flags"] = torch.rand(7) > 0.5
    made["empty"] = torch.empty(0, 3)
    made["complex"] = torch.randn(6, dtype=torch.complex64)
    return made


def on_device(tensors):
    names = [name for name in tensors if not name.startswith("counter")]
    moved = {name: tensors[name].to("standin") for name in names}
    for name in ("turned", "large and turned"):
        moved[name] = tensors[name].t().to("standin").t()
    return {name: moved.get(name, tensor) for name, tensor in tensors.items()}


def saved(standin, fault=None):
    """Returns for each order of streams whether all is stored as it was, and what the host has waited for."""
    device_stream.BUFFER_BYTES = BUFFER
    if fault == "order":
        standin.Stream.wait_stream = lambda self, other: None
    elif fault == "events":
        standin.Event.synchronize = lambda self: None
    elif fault == "flush":
        local.FLUSH = object()
    found = []
    for late in (False, True):
        folder = tempfile.mkdtemp()
        tensors = state()
        app = on_device(tensors)
        blank = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        standin.C.late(late)
        standin.C.reset()
        for name in app:
            if name != "flags" and not name.startswith("counter"):
                app[name].mul_(2)  # queued, and not waited for
        standin.C.reset()
        checkpoint.save(f"{folder}/1", app)
        waits = standin.waits()
        standin.C.late(False)
        wrong = []
        try:
            checkpoint.load(f"{folder}/1", blank)
        except CorruptionError:
            wrong = ["what was written is not what was summed"]
        shutil.rmtree(folder)
        for name, tensor in tensors.items():
            scale = 1 if name == "flags" or name.startswith("counter") else 2
            if not torch.equal(blank[name], tensor if scale == 1 else tensor * 2):
                wrong.append(name)
        found.append((wrong, waits))
    return found


def test_what_is_saved_is_what_was_queued_before():
    with mock.patch("os.fsync"):
        (found,) = on_accelerator(1, saved)
    for wrong, waits in found:
        assert wrong == []
        assert waits.pop("wait: D2H") == 3  # of what is turned, and too large for a buffer: in pieces
        assert list(waits) == ["wait: synchronize an event"] and waits.popitem()[1] <= 6  # one for each buffer


@pytest.mark.parametrize("fault", ["order", "events", "flush"])
def test_what_is_left_out_of_the_order_is_seen(fault):
    with mock.patch("os.fsync"):
        (found,) = on_accelerator(1, saved, fault)
    assert any(wrong for wrong, _ in found)


def in_flight(standin):
    """Returns the most bytes that were copied and not yet taken, and the places of the buffers within a page."""
    size = 1 << 20
    tensor = torch.arange(10 * size // 4, dtype=torch.float32).to("standin")
    device_stream.BUFFER_BYTES = size
    places, taken = set(), []
    begun, most = [0], 0
    begin = device_stream._Window.begin

    def counted(window):
        begun[0] += window._used
        begin(window)

    with mock.patch.object(device_stream._Window, "begin", counted):
        for memory in device_stream.streamed([tensor], tensor.nbytes):
            if memory is FLUSH:
                continue
            most = max(most, begun[0] - sum(map(len, taken)))
            taken.append(bytes(memory))
            places.add(torch.frombuffer(memory, dtype=torch.uint8).data_ptr())
    same = torch.equal(torch.frombuffer(bytearray(b"".join(taken)), dtype=torch.float32), tensor.cpu())
    return most, len(places), {place % 4096 for place in places}, same


def test_no_more_than_two_buffers_are_in_flight():
    assert on_accelerator(1, in_flight) == [(2 << 20, 2, {0}, True)]


def failed_write(standin):
    """Fails a write in its middle, and keeps the error; returns what is pinned by then, and what pages are left."""
    pinned, kept = [0], []
    pin, unpin, write = host_memory.pin, host_memory.unpin, local.LocalStorage.write

    def counted_pin(memory, device):
        pinned[0] += memory.nbytes
        return pin(memory, device)

    def counted_unpin(memory, device):
        pinned[0] -= memory.nbytes
        unpin(memory, device)

    def failing(storage, name, buffers):
        if "manifest" in name:
            return write(storage, name, buffers)
        iterator = iter(buffers)  # which the traceback keeps
        kept.extend(next(iterator) for _ in range(3))
        raise OSError("the disk is gone")

    folder = tempfile.mkdtemp()
    app = {"x": torch.ones(8 << 20, device="standin")}
    with (
        mock.patch.object(host_memory, "pin", counted_pin),
        mock.patch.object(host_memory, "unpin", counted_unpin),
        mock.patch.object(local.LocalStorage, "write", failing),
        pytest.raises(CheckpointError) as error,
    ):
        checkpoint.save(f"{folder}/1", app)
    shutil.rmtree(folder)
    assert error.value is not None
    memory = torch.frombuffer(max(kept, key=len), dtype=torch.uint8)
    return pinned[0], memory.nbytes, bool(memory.any())


def test_a_write_that_fails_keeps_no_buffers():
    ((pinned, nbytes, has_pages),) = on_accelerator(1, failed_write)
    assert nbytes >= 1 << 19 and pinned == 0 and not has_pages


class RefusingRuntime:
    """Functions of a runtime that may pin no memory."""

    def cudaHostRegister(self, *arguments):
        return 2

    def cudaHostUnregister(self, *arguments):
        raise AssertionError("nothing is pinned")


def without_pinned_memory(standin):
    """Saves and loads in every way; returns what is wrong, and the warnings."""
    import logging

    warned = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("shardopt").addHandler(handler)
    standin.module.cudart = RefusingRuntime
    folder, tensors, wrong = tempfile.mkdtemp(), state(), []
    checkpoint.save(f"{folder}/now", on_device(tensors))
    for stage in ("now", "lazy"):
        checkpoint.async_save(f"{folder}/{stage}-behind", on_device(tensors), stage=stage).result(60)
    for name in ("now", "now-behind", "lazy-behind"):
        app = on_device({key: torch.zeros_like(tensor) for key, tensor in tensors.items()})
        checkpoint.load(f"{folder}/{name}", app)
        wrong += [(name, key) for key in tensors if not torch.equal(app[key].cpu(), tensors[key])]
    shutil.rmtree(folder)
    return wrong, [line for line in warned if "pinned" in line]


def test_memory_that_cannot_be_pinned_is_used_as_it_is():
    with mock.patch("os.fsync"):
        ((wrong, warned),) = on_accelerator(1, without_pinned_memory)
    assert wrong == [] and len(warned) == 1


def on_a_stream_of_its_own(standin):
    """Saves and loads in the order of the program's own stream; returns what each was found to have, and should have.

    The threads of a load, of a save in the background and of a comparison with a base have default streams.
    """
    unchanged._THREADS, folder, found = 4, tempfile.mkdtemp(), {}
    shapes = {"a": (400, 300), "b": (3,), "c": (1 << 19,)}
    standin.C.side(True)
    with standin.stream(standin.Stream()):
        app = {name: torch.zeros(shape, device="standin") for name, shape in shapes.items()}

        def change(value):
            for tensor in app.values():
                tensor.fill_(value)  # queued

        def stored(name):
            into = {key: torch.zeros(shape) for key, shape in shapes.items()}
            checkpoint.load(f"{folder}/{name}", into)
            return sorted({float(value) for tensor in into.values() for value in tensor.unique()})

        def loaded(name, into, **options):
            for tensor in into.values():
                tensor.fill_(9)
            checkpoint.load(f"{folder}/{name}", into, **options)
            return sorted({float(value) for tensor in into.values() for value in tensor.cpu().unique()})

        change(1)
        checkpoint.save(f"{folder}/1", app)
        found["save"] = stored(1), [1.0]
        change(2)
        checkpoint.save(f"{folder}/2", app, base=f"{folder}/1")
        found["save with a base"] = stored(2), [2.0]
        for name, stage in ((3, "now"), (4, "lazy")):
            change(name)
            pending = checkpoint.async_save(f"{folder}/{name}", app, base=f"{folder}/2", stage=stage)
            if stage == "now":
                change(9)
            pending.result(60)
            found[f"async_save, {stage}"] = stored(name), [float(name)]
        found["load"] = loaded(1, app), [1.0]
        wide = {name: tensor.double() for name, tensor in app.items()}
        found["load, cast"] = loaded(2, wide, strict=checkpoint.Strictness(dtype="cast")), [2.0]
    standin.C.side(False)
    shutil.rmtree(folder)
    return found


def test_saves_and_loads_go_by_the_programs_own_stream():
    with mock.patch("os.fsync"):
        (found,) = on_accelerator(1, on_a_stream_of_its_own)
    assert {name: each for name, each in found.items() if each[0] != each[1]} == {} and len(found) == 6
