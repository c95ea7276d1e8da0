"""Gives torch the device "standin", an accelerator simulated on the CPU (`standin.cpp`), where this is imported.

A process has it until it ends: torch lets one device be renamed, once. So tests use it on ranks of their own.
"""

from __future__ import annotations

import contextlib
import types

import torch

from tests.standin.build import loaded

torch.utils.rename_privateuse1_backend("standin")
C = loaded()
KIND = "standin"


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **kwargs):
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        device = torch.device("standin", C.current_device()) if device is None else torch.device(device)
        if device.index is None:
            device = torch.device("standin", C.current_device())
        return super().__new__(cls, device=device, priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, device="standin", enable_timing=enable_timing)


class device:
    def __init__(self, which):
        which = torch.device("standin", which) if isinstance(which, int) else torch.device(which)
        self.index = C.current_device() if which.index is None else which.index

    def __enter__(self):
        self.before = C.current_device()
        C.set_device(self.index)

    def __exit__(self, *exc):
        C.set_device(self.before)


@contextlib.contextmanager
def stream(which):
    if which is None:
        yield
        return
    before_device = C.current_device()
    before = current_stream(which.device)
    torch.accelerator.set_stream(which)  # sets the device, too
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        C.set_device(before_device)


def current_stream(which=None):
    which = torch.device("standin") if which is None else torch.device(which)
    return torch.accelerator.current_stream(
        torch.device("standin", C.current_device()) if which.index is None else which
    )


module = types.ModuleType("torch.standin")
module.__dict__.update(
    cudart=lambda: C,
    Stream=Stream,
    Event=Event,
    device=device,
    stream=stream,
    current_stream=current_stream,
    set_stream=torch.accelerator.set_stream,
    default_stream=lambda which=None: current_stream(which),
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    _lazy_init=lambda: None,  # torch 2.11 takes a device without it for never used, and never waits for it
    device_count=lambda: 2,
    current_device=C.current_device,
    set_device=lambda which: C.set_device(which if isinstance(which, int) else torch.device(which).index),
    synchronize=lambda which=None: C.synchronize(-1 if which is None else torch.device(which).index or 0),
    manual_seed_all=lambda seed: None,
    manual_seed=lambda seed: None,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    empty_cache=lambda: None,
    memory_allocated=lambda which=None: C.allocated()[0],
    memory_reserved=lambda which=None: C.allocated()[0],
    max_memory_allocated=lambda which=None: C.allocated()[1],
    get_rng_state=lambda which=None: torch.get_rng_state(),
    set_rng_state=lambda state, which=None: torch.set_rng_state(state),
    is_current_stream_capturing=lambda: False,
)
torch._register_device_module("standin", module)
torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=None)


@contextlib.contextmanager
def no_waits():
    """Within it, what makes the host wait for the device raises, as under CUDA's sync debug mode."""
    before = C.refuse_waits(True)
    try:
        yield
    finally:
        C.refuse_waits(before)


def waits():
    return {k: v for k, v in C.counts().items() if k.startswith("wait")}
