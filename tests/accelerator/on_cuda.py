"""CUDA under the names of the stand-in's module, as far as tests that run on both need them."""

import contextlib
import types
import warnings

import torch

KIND = "cuda"
Stream, Event, stream = torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream


@contextlib.contextmanager
def no_waits():
    """Within it, what makes the host wait for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


_ignored = dict.fromkeys(("late", "side"), lambda on: None)  # a GPU has its own order
C = types.SimpleNamespace(**_ignored, reset=lambda: None, violations=lambda: [])
