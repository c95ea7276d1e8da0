"""Loads into an accelerator: through pinned slots, in the order of streams, and bounded."""

import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardopt import checkpoint
from shardopt.checkpoint.sources.reading import checking, device_scratch
from shardopt.errors import CorruptionError
from shardopt.runtime import host_memory
from tests.accelerator.support import needs_standin, on_accelerator
from tests.accelerator.test_streams import on_device, state

pytestmark = needs_standin

BUFFER = 2 << 20
BATCH = 2 << 18  # with two segments more a slot has 1 MiB


def stored_in(folder):
    """Saves the state, and a tensor of many buffers, from the CPU; returns it."""
    tensors = state() | {"many": torch.randn(3000, 700), "wide": torch.randn(40, 100, dtype=torch.float64)}
    checkpoint.save(f"{folder}/1", tensors)
    return tensors


def blank_like(tensors):
    return on_device({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})


def wrong_in(app, tensors):
    """Returns the names whose numbers are not those that are stored, and were doubled where they can be."""
    return [
        name
        for name, tensor in tensors.items()
        if not torch.equal(app[name].cpu(), tensor if is_left(name) else tensor * 2)
    ]


def is_left(name):
    return name == "flags" or name.startswith("counter")


def loaded(standin, fault=None, buffer=BUFFER):
    """Returns for each order of streams what is wrong after a load, and what the host has waited for."""
    kept = []
    device_scratch.BUFFER_BYTES, checking._DISK_SIZES = buffer, checking._DISK_SIZES._replace(batch=BATCH)
    if fault == "order":
        standin.Stream.wait_stream = lambda self, other: None
    elif fault == "events":
        standin.Event.query = lambda self: True
    elif fault == "end":
        standin.Stream.query = lambda self: True
        # Else late copies would read what is gone.
        device_scratch.HostMemory.give_back = lambda memory: kept.append(memory)
    found = []
    for late in (False, True):
        folder = tempfile.mkdtemp()
        tensors = stored_in(folder)
        app = blank_like(tensors)
        standin.C.late(late)
        for name in app:
            if not is_left(name):
                app[name].add_(1)  # queued, and not waited for: the load comes after it
        standin.C.reset()
        checkpoint.load(f"{folder}/1", app)
        waits = standin.waits()
        for name in app:
            if not is_left(name):
                app[name].mul_(2)
        standin.C.late(False)
        found.append((wrong_in(app, tensors), waits, standin.C.violations()))
        shutil.rmtree(folder)
    standin.C.reset()  # with faults there are violations, which have been returned
    return found


def test_what_is_loaded_is_what_was_stored():
    with mock.patch("os.fsync"):
        (found,) = on_accelerator(1, loaded)
    for wrong, waits, violations in found:
        assert wrong == [] and violations == []
        assert waits.pop("wait: synchronize a stream", 0) <= 1
        # One for each slot that is taken again, as here a device does what it must and no more.
        assert set(waits) <= {"wait: synchronize an event"}


def into_inference_tensors(standin):
    folder = tempfile.mkdtemp()
    tensors = stored_in(folder)
    with torch.inference_mode():
        app = blank_like(tensors)
    checkpoint.load(f"{folder}/1", app)
    shutil.rmtree(folder)
    return [name for name, tensor in tensors.items() if not torch.equal(app[name].cpu(), tensor)]


def test_a_model_made_in_inference_mode_is_loaded():
    assert on_accelerator(1, into_inference_tensors) == [[]]


def test_what_fits_into_two_buffers_waits_for_the_end_alone():
    with mock.patch("os.fsync"):
        (found,) = on_accelerator(1, loaded, None, 64 << 20)
    for wrong, waits, _ in found:
        assert wrong == [] and sum(waits.values()) <= 1
    assert any(waits for _, waits, _ in found)


@pytest.mark.parametrize("fault", ["order", "events", "end"])
def test_what_is_left_out_of_the_order_is_seen(fault):
    with mock.patch("os.fsync"):
        (found,) = on_accelerator(1, loaded, fault)
    assert any(wrong or violations for wrong, _, violations in found)


def in_flight(standin):
    """Returns the most bytes of slots that are read into or copied from, what is pinned, and what is left of it."""
    device_scratch.BUFFER_BYTES, checking._DISK_SIZES = BUFFER, checking._DISK_SIZES._replace(batch=BATCH)
    folder = tempfile.mkdtemp()
    tensor = torch.randn(12 << 20)
    checkpoint.save(f"{folder}/1", {"x": tensor})
    app = {"x": torch.zeros(12 << 20, device="standin")}
    pinned, most, flying, places = [], [0], {}, set()
    pin, unpin = host_memory.pin, host_memory.unpin
    take = device_scratch.DeviceScratch.take

    def counted_pin(memory, device):
        pinned.append(memory.nbytes)
        return pin(memory, device)

    def counted_unpin(memory, device):
        pinned.append(-memory.nbytes)
        unpin(memory, device)

    def counted_take(scratch):
        memory = take(scratch)
        flying[id(memory)] = memory.nbytes
        places.add(torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 4096)
        most[0] = max(most[0], sum(flying.values()))
        return memory

    with (
        mock.patch.object(checking, "_DISK_SIZES", checking._DISK_SIZES._replace(threads=4, most_threads=4)),
        mock.patch.object(host_memory, "pin", counted_pin),
        mock.patch.object(host_memory, "unpin", counted_unpin),
        mock.patch.object(device_scratch.DeviceScratch, "take", counted_take),
    ):
        checkpoint.load(f"{folder}/1", app)
    shutil.rmtree(folder)
    return most[0], max(pinned), sum(pinned), places, torch.equal(app["x"].cpu(), tensor)


def test_no_more_than_two_buffers_are_in_flight():
    slot = BATCH + (2 << 18)
    with mock.patch("os.fsync"):
        ((most, pinned, left, places, same),) = on_accelerator(1, in_flight)
    assert same and places == {0} and left == 0
    assert most <= pinned == 2 * 3 * slot  # four threads and the batch that is being made take six slots


def cast_and_damaged(standin):
    """Returns whether numbers are right in another dtype and turned; and what is pinned after a damaged file."""
    folder = Path(tempfile.mkdtemp())
    tensors = {"a": torch.randn(300, 40), "b": torch.randn(1000, 900)}
    checkpoint.save(folder / "1", tensors)
    app = {"a": torch.zeros(300, 40, dtype=torch.bfloat16, device="standin")}
    app["b"] = torch.zeros(900, 1000, device="standin").t()
    strict = checkpoint.Strictness(dtype="cast")
    checkpoint.load(folder / "1", app, strict=strict)
    right = torch.equal(app["a"].cpu(), tensors["a"].bfloat16()) and torch.equal(app["b"].cpu(), tensors["b"])
    (file,) = [each for each in (folder / "1").iterdir() if each.stat().st_size > 1 << 20]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    pinned = []
    pin, unpin = host_memory.pin, host_memory.unpin
    with (
        mock.patch.object(host_memory, "pin", lambda *memory: pinned.append(1) or pin(*memory)),
        mock.patch.object(host_memory, "unpin", lambda *memory: pinned.append(-1) or unpin(*memory)),
        pytest.raises(CorruptionError),
    ):
        checkpoint.load(folder / "1", app, strict=strict)
    shutil.rmtree(folder)
    return right, pinned


def columns_and_casts(standin, folder):
    """Returns whether columns of two cuts, and casts of them, are right, and what was copied how."""
    tensors = {name: torch.arange(600.0 * 700).reshape(600, 700) % 251 for name in ("columns", "cast", "both", "rows")}
    checkpoint.save(folder / "1", tensors)
    mesh = init_device_mesh("standin", (dist.get_world_size(),))
    app, own = {}, {}
    for name, tensor in tensors.items():
        placement = Shard(1) if name in ("columns", "both") else Shard(0)
        own[name] = tensor.chunk(dist.get_world_size(), placement.dim)[dist.get_rank()]
        local = torch.zeros(
            own[name].shape, dtype=torch.bfloat16 if name in ("cast", "both") else None, device="standin"
        )
        app[name] = DTensor.from_local(local, mesh, [placement])
    found = []
    for late in (False, True):
        standin.C.late(late)
        for tensor in app.values():
            tensor.to_local().fill_(-1)  # queued, and not waited for
        standin.C.reset()
        checkpoint.load(folder / "1", app, strict=checkpoint.Strictness(dtype="cast"))
        counts = standin.C.counts()
        for tensor in app.values():
            tensor.to_local().mul_(2)
        standin.C.late(False)
        right = [torch.equal(app[name].to_local().float().cpu(), tensor * 2) for name, tensor in own.items()]
        found.append((all(right), counts))
    return found


def test_columns_and_casts_are_copied_from_pinned_memory(tmp_path):
    with mock.patch("os.fsync"):
        of_ranks = on_accelerator(2, columns_and_casts, tmp_path)
    for right, counts in (each for found in of_ranks for each in found):
        assert right and counts["H2D beside"] >= 4
        assert "H2D, staged" not in counts and "wait: H2D" not in counts


def shared_boxes(standin, folder):
    """Returns whether boxes that one rank reads for both are right on both, and what was copied how."""
    mesh = init_device_mesh("standin", (2,))
    stored = {"whole": torch.arange(600.0 * 700).reshape(600, 700), "cast": torch.arange(900.0).reshape(30, 30) % 251}
    stored["mine"] = stored["whole"] + 1
    checkpoint.save(folder / "1", stored)
    app = {
        "whole": DTensor.from_local(torch.zeros(600, 700, device="standin"), mesh, [Replicate()]),
        "cast": torch.zeros(30, 30, dtype=torch.bfloat16, device="standin"),
        "mine": DTensor.from_local(torch.zeros(300, 700, device="standin"), mesh, [Shard(0)]),
    }
    local = {name: each.to_local() if isinstance(each, DTensor) else each for name, each in app.items()}
    own = stored | {"mine": stored["mine"].chunk(2)[dist.get_rank()]}
    found = []
    for late in (False, True):
        standin.C.late(late)
        for tensor in local.values():
            tensor.fill_(-1)  # queued, and not waited for
        standin.C.reset()
        checkpoint.load(folder / "1", app, strict=checkpoint.Strictness(dtype="cast"), share_reads="always")
        counts = standin.C.counts()
        for tensor in local.values():
            tensor.mul_(2)
        standin.C.late(False)
        found.append((all(torch.equal(local[name].float().cpu(), each * 2) for name, each in own.items()), counts))
    return found


def test_boxes_that_one_rank_reads_for_others_are_sent_between_devices(tmp_path):
    with mock.patch("os.fsync"):
        of_ranks = on_accelerator(2, shared_boxes, tmp_path)
    for right, counts in (each for found in of_ranks for each in found):
        assert right and counts["H2D beside"] >= 2 and "H2D, staged" not in counts
        assert "wait: D2H" not in counts and "wait: H2D" not in counts


def test_casts_turned_memory_and_damage():
    assert on_accelerator(1, cast_and_damaged) == [(True, [1, -1])]
