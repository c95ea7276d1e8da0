"""A stand-in for an accelerator: a device for torch, simulated on the CPU, on torch's public extension points.

- Memory: two devices. Device memory faults when the host touches it, freed memory is poisoned and reused per stream,
  tensors on mixed devices are refused. Which devices a thread has woken is recorded (`C.contexts()`).
- Order: a copy that does not block runs as late as CUDA may run it; `C.late(True)` turns that round: the default
  stream's work is late, side streams are early. Deterministic, without sleeps: a wrong order shows as wrong numbers.
- Waits: `no_waits()` raises where the host would wait for the device; `waits()` counts.
- Ranks: `group` wraps gloo: `init_process_group("cpu:gloo,standin:standin_gloo")`.

It does not reach NCCL, graphs, Triton's launches, speed, and the limits of an allocator. `launch/setup.sh` builds it
where there is a compiler (`build.py`).
"""
