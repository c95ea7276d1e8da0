"""Saves in the background from an accelerator: the state at the call is stored, whatever the order of streams."""

import itertools
import random
import shutil
import tempfile
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving import save
from shardopt.checkpoint.saving.writing import device_stream, staging
from tests.accelerator.support import each_kind, needs_standin, on_accelerator

ORDERS = list(itertools.product(["now", "lazy"], [False, True]))


def saved_beside_steps(standin, rounds, fault=None):
    """Saves while the next steps run, with delays at random in the threads of both; returns for each stage and order
    whether the state at the call is stored.

    Args:
        fault: a method of streams that does nothing.
    """
    delays = random.Random(rounds)

    def pause():
        if fault is None:  # else what is not waited for may happen all the same
            time.sleep(delays.choice([0.0, 0.0, delays.uniform(0.0, 0.004)]))

    if fault is None:
        for kind, name in WHERE_IT_PAUSES:
            delay(getattr(standin, kind), name, pause)
    else:
        setattr(standin.Stream, fault, lambda self, *other: None)
    found = {}
    for stage, late in ORDERS:
        folder = tempfile.mkdtemp()
        standin.C.late(late)
        model = nn.Linear(16, 16).to(standin.KIND)
        optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
        inputs = torch.randn(4, 16).to(standin.KIND)
        right = True
        for number in range(rounds):
            step(model, optimizer, inputs)
            expected = {name: tensor.detach().clone() for name, tensor in tensors(model, optimizer).items()}
            pending = checkpoint.async_save(f"{folder}/{number}", {"model": model, "optimizer": optimizer}, stage=stage)
            for _ in range(4):
                pause()
                step(model, optimizer, inputs)
            pending.result(60)
            stored = nn.Linear(16, 16)
            app = {"model": stored, "optimizer": shardopt.keyed("adamw", stored.named_parameters(), lr=0.1)}
            checkpoint.load(f"{folder}/{number}", app, init_state=True)
            for name, tensor in tensors(stored, app["optimizer"]).items():
                right &= torch.equal(tensor, expected[name].cpu())
        standin.C.late(False)
        shutil.rmtree(folder)
        found[stage, late] = right
    return found


WHERE_IT_PAUSES = [("Stream", "wait_stream"), ("Stream", "synchronize"), ("Event", "record"), ("Event", "synchronize")]


def delay(kind, name, pause):
    """Has a method of streams or events begin later, in any thread."""
    method = getattr(kind, name)

    def delayed(self, *args, **kwargs):
        pause()
        return method(self, *args, **kwargs)

    setattr(kind, name, delayed)


def step(model, optimizer, inputs):
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(model, optimizer):
    state = optimizer.state_dict()["state"]
    return dict(model.named_parameters()) | {
        f"{name}.{entry}": tensor for name, entries in state.items() for entry, tensor in entries.items()
    }


@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.exhaustive)])
@each_kind
def test_the_state_at_the_call_is_stored(rounds, kind):
    with mock.patch("os.fsync"):
        (found,) = on_accelerator(1, saved_beside_steps, rounds, kind=kind, deadline_seconds=60.0 + rounds)
    assert found == dict.fromkeys(ORDERS, True)


@needs_standin
@pytest.mark.parametrize("fault", ["wait_stream", "synchronize"])
def test_streams_that_do_not_wait_are_seen(fault):
    """Whether the test above can fail: without either wait some order stores other numbers."""
    with mock.patch("os.fsync"):
        (found,) = on_accelerator(1, saved_beside_steps, 2, fault)
    assert not all(found.values())


def saved_from_the_second_device(standin, stage):
    """Saves replicas from device 1, parts of which are copied by a thread; returns the devices it has woken."""
    standin.C.set_device(1)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    standin.C.reset()
    for number, size in enumerate([300_000, 300_000, 700_000]):  # for more, the first memory is let go
        weight = nn.Parameter(torch.ones(size, 16, device="standin:1"))
        app = {"weight": weight, "optimizer": shardopt.keyed("sgd", {"weight": weight}, lr=0.1)}
        checkpoint.async_save(f"{folder[0]}/{number}", app, stage=stage).result(60)
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return standin.C.contexts()


@needs_standin
@pytest.mark.parametrize("stage", ["now", "lazy"])
def test_a_save_wakes_no_other_device(stage):
    assert on_accelerator(2, saved_from_the_second_device, stage) == [{1}, {1}]


def pinned_in_the_call(standin):
    """Returns how many bytes a lazy save pins in the call, and how many in its thread."""

    from shardopt.checkpoint.saving.writing.staging import Staging
    from shardopt.runtime import host_memory

    pinned, called = [0, 0], threading.Event()
    pin, finish = host_memory.pin, Staging.finish

    def counted(memory, device):
        pinned[threading.current_thread() is not threading.main_thread()] += memory.nbytes
        return pin(memory, device)

    def late(staging, writes=None):
        assert called.wait(30)
        finish(staging, writes)

    folder = tempfile.mkdtemp()
    model = nn.BatchNorm1d(1 << 18).to("standin")
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
    with mock.patch.object(host_memory, "pin", counted), mock.patch.object(Staging, "finish", late):
        pending = checkpoint.async_save(f"{folder}/1", {"model": model, "optimizer": optimizer}, stage="lazy")
        called.set()
        pending.result(60)
    shutil.rmtree(folder)
    return pinned


@needs_standin
def test_a_lazy_save_pins_in_the_call_no_more_than_it_copies_there():
    ((call, thread),) = on_accelerator(1, pinned_in_the_call)
    size = (4 << 18) + 4096  # with room for a place within a page
    assert 2 * size <= call < 2 * size + 4096 and thread == 2 * size  # running mean and variance; weight and bias


def abandoned(standin):
    """Has saves fail once copies have begun; then their memory is let go in each way. Any violation is raised."""
    from shardopt.checkpoint.saving import async_save
    from shardopt.checkpoint.saving.writing.staging import Staging

    def interrupted(*args):
        raise KeyboardInterrupt

    small = {str(at): torch.ones(1 << 16, device=standin.KIND) for at in range(4)}
    large = small | {"large": torch.ones(1 << 23, device=standin.KIND)}
    with tempfile.TemporaryDirectory() as folder:
        for number, fails in enumerate([(Staging, "_sample"), (async_save, "hold_steps"), (Staging, "finish")]):
            for end in ("save", "close", "drop"):
                saver = async_save.AsyncSaver()
                saver.save(f"{folder}/{number}{end}1", small).result(60)
                with mock.patch.object(*fails, interrupted), pytest.raises(KeyboardInterrupt):
                    saver.save(f"{folder}/{number}{end}2", small).result(60)
                if end == "save":
                    saver.save(f"{folder}/{number}{end}3", large).result(60)
                elif end == "close":
                    saver.close()
                del saver
    standin.C.synchronize(-1)


@needs_standin
def test_memory_of_a_save_that_failed_stays_until_no_stream_needs_it():
    with mock.patch("os.fsync"):
        on_accelerator(1, abandoned)


def without_streams(standin):
    """Saves, and steps in backward, on a device that lacks what `torch.mps` does; returns what was stored."""
    for name in ("Stream", "stream", "current_stream", "default_stream", "set_stream", "device", "cudart"):
        delattr(standin.module, name)
    for name in ("is_initialized", "current_device", "memory_allocated"):
        delattr(standin.module, name)
    shardopt.RandomState(on_resize="keep").state_dict()
    stored = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in ("now", "lazy"):
            model = nn.Linear(2, 2, bias=False).to(standin.KIND)
            optimizer = shardopt.keyed("sgd", model.named_parameters(), lr=1.0)
            app = {"model": model, "optimizer": optimizer, "view": model.weight.detach().T}
            expected = model.weight.detach().cpu()
            pending = checkpoint.async_save(f"{folder}/{stage}", app, stage=stage)
            step(model, optimizer, torch.ones(4, 2).to(standin.KIND))
            pending.result(60)
            loaded = nn.Linear(2, 2, bias=False)
            app = {
                "model": loaded,
                "optimizer": shardopt.keyed("sgd", loaded.named_parameters()),
                "view": torch.ones(2, 2),
            }
            checkpoint.load(f"{folder}/{stage}", app)
            stored.append(torch.equal(loaded.weight, expected))
    shardopt.in_backward(model, "sgd", lr=0.1)
    model(torch.ones(4, 2).to(standin.KIND)).sum().backward()
    return stored


@needs_standin
def test_a_device_without_streams_saves_in_the_background():
    assert on_accelerator(1, without_streams) == [[True, True]]


def gathered(standin):
    """Returns whether a large view comes to the host as it is, also in the background; and how much of the device's
    memory that took."""
    whole = torch.randn(256, 1024)
    there = whole.to(standin.KIND).T
    before = standin.C.allocated()[0]
    with mock.patch.multiple(device_stream, BUFFER_BYTES=1 << 16, _SMALL_BYTES=0):
        right = torch.equal(device_stream.to_host(there), whole.T)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.async_save(folder, {"x": there}).result(60)
            app = {"x": torch.empty(whole.T.shape)}
            checkpoint.load(folder, app)
    right &= torch.equal(app["x"], whole.T)
    return right, standin.C.allocated()[1] - before


@needs_standin
def test_a_large_view_is_gathered_in_pieces():
    ((right, most),) = on_accelerator(1, gathered)
    assert right and most <= 4 << 16


SMALL = [(), (3,), (0,), (17, 2), (1,), (64,), (4, 1, 5)] * 12
DTYPES = "float32", "bfloat16", "uint8", "complex128", "bool", "float8_e4m3fn", "uint16", "float64", "complex64"


def of_any_bits(shape, dtype):
    """Returns a tensor of bits at random, NaN of all kinds among them."""
    dtype = getattr(torch, dtype)
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def empty_neighbours(standin):
    host, there = torch.zeros(3), torch.arange(3.0).to(standin.KIND)
    empty = torch.empty(0, 4), torch.empty(0, 4, device=standin.KIND)
    device_stream.begin_copies(there.device, [empty, empty, (host, there), empty])
    torch.accelerator.synchronize()
    return host.tolist()


@each_kind
def test_tensors_without_elements_are_no_neighbours(kind):
    assert on_accelerator(1, empty_neighbours, kind=kind) == [[0, 1, 2]]


def small_ones(standin):
    """Saves tensors of many dtypes and sizes, which change right after; returns whether their bits are stored, and how
    many copies each save took.
    """
    found = {}
    for late, stage in itertools.product([False, True], ["save", "now", "lazy"]):
        standin.C.late(late)
        folder = tempfile.mkdtemp()
        shapes = [*SMALL, (300, 300), *SMALL[:30]]
        there = {str(i): of_any_bits(shape, DTYPES[i % len(DTYPES)]).to(standin.KIND) for i, shape in enumerate(shapes)}
        there["view"] = torch.randn(40, 50).to(standin.KIND).t()[::2]
        weights = {str(i): nn.Parameter(torch.randn(i, 5).to(standin.KIND)) for i in range(1, 10)}
        optimizer = shardopt.keyed("sgd", weights, lr=0.5)
        app = {"v": there, "w": weights, "optimizer": optimizer}
        expected = [{name: each.detach().cpu() for name, each in tensors.items()} for tensors in (there, weights)]
        counts = getattr(standin.C, "counts", dict)  # of the stand-in
        before = counts().get("D2H beside", 0)
        if stage == "save":
            checkpoint.save(folder, app)
        else:
            pending = checkpoint.async_save(folder, app, stage=stage)
            for value in there.values():
                value.zero_()
            for weight in weights.values():
                weight.grad = torch.ones_like(weight)
            optimizer.step()
            pending.result(60)
        copies = counts().get("D2H beside", 0) - before
        stored = [{name: torch.zeros_like(each) for name, each in tensors.items()} for tensors in expected]
        checkpoint.load(folder, {"v": stored[0], "w": stored[1]}, strict=False)
        wrong = [
            name
            for got, wanted in zip(stored, expected, strict=True)
            for name in wanted
            if bits(got[name]) != bits(wanted[name])
        ]
        found[late, stage] = wrong, copies
        shutil.rmtree(folder)
    standin.C.late(False)
    return found


@each_kind
def test_small_tensors_are_copied_together(kind):
    with mock.patch("os.fsync"):
        (found,) = on_accelerator(1, small_ones, kind=kind)
    # A run, a large tensor, a run; a save begins its second buffer, and what is copied lazily has memory of its own.
    copies = {"save": 4, "now": 3, "lazy": 4} if kind == "standin" else dict.fromkeys(["save", "now", "lazy"], 0)
    assert found == {(late, stage): ([], copies[stage]) for late in (False, True) for stage in copies}


def on_a_full_device(standin):
    """Saves small tensors where the device has no memory left; returns whether they are stored, and the copies."""
    there = {str(i): torch.full((i,), float(i)).to(standin.KIND) for i in range(1, 9)}
    empty = torch.empty

    def none_left(*args, device=None, **kwargs):
        if device is not None and torch.device(device).type == standin.KIND:
            raise torch.OutOfMemoryError("no memory left")
        return empty(*args, device=device, **kwargs)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(torch, "empty", none_left):
        standin.C.reset()
        checkpoint.async_save(folder, there).result(60)
        copies = standin.C.counts()["D2H beside"]
        stored = {name: torch.zeros(len(value), device="cpu") for name, value in there.items()}
        checkpoint.load(folder, stored)
    return all(torch.equal(stored[name], value.cpu()) for name, value in there.items()), copies


@needs_standin
def test_small_tensors_are_copied_alone_where_the_device_is_full():
    assert on_accelerator(1, on_a_full_device) == [(True, 8)]


def kept_while_written(standin):
    """Returns how many bytes of the device a publication with a cast holds once it is staged, and not yet written."""
    folder, may_write = [tempfile.mkdtemp() if dist.get_rank() == 0 else None], threading.Event()
    dist.broadcast_object_list(folder)
    weights = {f"w{i}": torch.ones(1 << 16).to(standin.KIND) for i in range(4)}
    write_files = save.write_files

    def waiting(*args, **kwargs):
        may_write.wait(30)
        return write_files(*args, **kwargs)

    before = standin.C.allocated()[0]
    with (
        mock.patch.object(staging, "LEAST_SHARED_BYTES", 0),
        mock.patch.object(save, "write_files", waiting),
        checkpoint.Publisher(folder[0], dtype=torch.bfloat16, durable=False) as publisher,
    ):
        pending = publisher.publish(1, weights)
        staged = pending.staged.wait(30)
        deadline = time.monotonic() + 5
        while standin.C.allocated()[0] > before and time.monotonic() < deadline:  # the thread is on its way
            time.sleep(0.01)
        kept = standin.C.allocated()[0] - before
        may_write.set()
        pending.result()
    return staged, kept


def test_casts_of_replicas_are_freed_once_they_are_copied():
    assert on_accelerator(2, kept_while_written) == [(True, 0)] * 2
