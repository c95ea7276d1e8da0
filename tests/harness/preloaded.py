"""Imported last by the fork server: makes it cheap to fork, and its ranks cheap to run.

It uses DTensors, `fully_shard` and an optimizer once. So what torch imports and keeps at the first use, which takes
a rank some 15 ms of the processor, is there. Only what depends on no rank stays: no group, no mesh, no placement that
torch keeps by meshes, and no number is drawn.

What it has loaded so far, a million objects, is kept out of the garbage collections of all ranks, which would look at
each of them and so copy the memory that they share with the server. And its memory is brought into huge pages: a fork
copies a table of all pages, and its end frees that again, which takes most of the time that a rank needs to start.
"""

import ctypes
import gc
import mmap
import threading

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.disk import leave_unflushed_as_parent
from tests.support.fake_rank import as_rank

_COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1; others say that they do not know it
_HUGE_BYTES = 2 << 20


def _into_huge_pages() -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as file:
        maps = [line.split() for line in file]
    for addresses, allowed, _, _, inode, *_ in maps:
        if allowed == "rw-p" and inode == "0":  # memory of no file
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin, end = -(-begin // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
            if begin < end and madvise(begin, end - begin, mmap.MADV_HUGEPAGE) == 0:
                madvise(begin, end - begin, _COLLAPSE)


@torch.no_grad()
def _use_once() -> None:
    with torch.random.fork_rng(devices=[]), as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(torch.ones(4, 4), mesh, [placement])
            tensor.mul_(2.0).add_(tensor).copy_(tensor.detach().clone())
            (torch.zeros_like(tensor) * 2.0).sum()
            tensor.redistribute(mesh, [Replicate()]).full_tensor()
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        fully_shard(model, mesh=mesh)
        model.load_state_dict(model.state_dict())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.optim.AdamW(model.parameters()).step()


leave_unflushed_as_parent()
_use_once()
assert threading.active_count() == 1  # a fork would lose the others
gc.collect()
gc.freeze()
_into_huge_pages()
