"""Collectives of the stand-in, and of GPUs that ranks share, which NCCL refuses: through gloo, with copies to the host.

What was sent is read, and what was got is written, in the order of streams: without a wait there is no result. The host
waits for these copies, as it would not with NCCL, so the stand-in counts no wait there.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class _Work(dist._Work):
    def __init__(self, finish=lambda: None, result=None):
        super().__init__()
        self._finish, self._result, self._done = finish, result, False

    def wait(self, timeout=None):
        if not self._done:
            self._done = True
            self._finish()
        return True

    def get_future(self):
        self.wait()
        future = torch.futures.Future()
        future.set_result(self._result)
        return future

    def is_completed(self):
        return self._done

    def result(self):
        return self._result


@contextlib.contextmanager
def _uncounted(t):
    if t.device.type != "standin":
        yield
        return
    from tests.standin.device import C

    before = C.uncounted(True)
    try:
        yield
    finally:
        C.uncounted(before)


def _host(t):
    with _uncounted(t):
        return t.detach().cpu() if t.device.type != "cpu" else t


def _give(out, host):
    with _uncounted(out):
        out.detach().copy_(host)


class StandinGroup(ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo, self._store = dist.ProcessGroupGloo(store, rank, size, timeout=timeout), store

    # -- helpers
    def _is_host(self, t):
        if t.device.type == "cpu" and "cpu:" not in dist.get_backend_config(self):
            raise RuntimeError("No backend type associated with device type cpu")  # as torch says of NCCL alone
        return t.device.type == "cpu"

    def _run(self, call, outputs, hosts):
        call(hosts).wait()

        def finish():
            for out, host in zip(outputs, hosts, strict=True):
                if out is not host:
                    _give(out, host)

        return finish

    def _in_place(self, tensors, call):
        if all(map(self._is_host, tensors)):
            return call(list(tensors))
        hosts = [_host(t) for t in tensors]
        return _Work(self._run(call, tensors, hosts), list(tensors))

    def allreduce(self, tensors, opts=None):
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        opts = opts or dist.AllreduceOptions()
        avg = opts.reduceOp == dist.ReduceOp.AVG
        if avg:
            opts.reduceOp = dist.ReduceOp.SUM

        def call(h):
            w = self._gloo.allreduce(h, opts)
            if avg:
                w.wait()
                for each in h:
                    each.div_(self.size())
            return w

        return self._in_place(tensors, call)

    def broadcast(self, tensors, opts=None):
        return self._in_place(tensors, lambda h: self._gloo.broadcast(h, opts or dist.BroadcastOptions()))

    def barrier(self, opts=None):
        options = dist.BarrierOptions()
        return self._gloo.barrier(options)

    def allgather(self, outs, ins, opts=None):
        if self._is_host(ins[0]):
            return self._gloo.allgather(outs, ins)
        hosts = [[torch.empty_like(o, device="cpu") for o in out] for out in outs]
        self._gloo.allgather(hosts, [_host(i) for i in ins]).wait()

        def finish():
            for out, host in zip(outs, hosts, strict=True):
                for o, h in zip(out, host, strict=True):
                    _give(o, h)

        return _Work(finish, outs)

    def _allgather_base(self, out, inp, opts=None):
        if self._is_host(inp):
            return self._gloo._allgather_base(out, inp)
        host = torch.empty(out.shape, dtype=out.dtype)
        self._gloo._allgather_base(host, _host(inp).contiguous()).wait()
        return _Work(lambda: _give(out, host), [out])

    def allgather_into_tensor_coalesced(self, outs, ins, opts=None):
        works = [self._allgather_base(o, i) for o, i in zip(outs, ins, strict=True)]
        return _Work(lambda: [w.wait() for w in works], outs)

    def _reduce_scatter_base(self, out, inp, opts=None):
        opts = opts or dist.ReduceScatterOptions()
        host = _host(inp).clone()
        avg = opts.reduceOp == dist.ReduceOp.AVG
        all_ = dist.AllreduceOptions()
        all_.reduceOp = dist.ReduceOp.SUM if avg else opts.reduceOp
        self._gloo.allreduce([host], all_).wait()
        mine = host.reshape(-1).view(self.size(), -1)[self.rank()].view(out.shape)
        if avg:
            mine = mine / self.size()
        if self._is_host(out):
            _give(out, mine)
            return _Work(result=[out])
        return _Work(lambda: _give(out, mine), [out])

    def reduce_scatter_tensor_coalesced(self, outs, ins, opts=None):
        works = [self._reduce_scatter_base(o, i, opts) for o, i in zip(outs, ins, strict=True)]
        return _Work(lambda: [w.wait() for w in works], outs)

    def alltoall_base(self, out, inp, out_splits, in_splits, opts=None):
        if self._is_host(inp):
            return self._gloo.alltoall_base(out, inp, out_splits, in_splits)
        host = torch.empty(out.shape, dtype=out.dtype)
        self._gloo.alltoall_base(host, _host(inp), out_splits, in_splits).wait()
        return _Work(lambda: _give(out, host), [out])

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def send(self, tensors, dst, tag):
        return self._gloo.send([_host(t) for t in tensors], dst, tag)

    def recv(self, tensors, src, tag):
        return self._in_place(tensors, lambda h: self._gloo.recv(h, src, tag))

    def scatter(self, outs, ins, opts):
        hosts = [torch.empty_like(o, device="cpu") for o in outs]
        self._gloo.scatter(hosts, [[_host(i) for i in each] for each in ins], opts).wait()
        return _Work(lambda: [_give(o, h) for o, h in zip(outs, hosts, strict=True)], outs)

    def getBackendName(self):
        return "standin"

    def get_group_store(self):
        return self._store

    @property
    def pg_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self):
        return self.pg_name

    def name(self):
        return "standin"

    def _set_sequence_number_for_group(self):
        pass


def _make(store, rank, size, timeout):
    return StandinGroup(store, rank, size, timeout)


dist.Backend.register_backend("standin_gloo", _make, devices=["cpu", "standin"])
dist.Backend.register_backend("cuda_gloo", _make, devices=["cuda"])
