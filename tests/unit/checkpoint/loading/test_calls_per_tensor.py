"""What saves and loads of many small tensors do for each: Python's calls, which count alike on every machine."""

import sys
import threading

import pytest
import torch

from shardopt import checkpoint

MOST = {"load": 10.5, "save": 7.5}


def calls_of(work):
    """Returns how many Python functions a call enters, on all threads; those of comprehensions and generators too."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event == "call"

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count


@pytest.mark.parametrize("how", MOST)
def test_each_small_tensor_takes_few_calls(tmp_path, how):
    counts = []
    for number in (300, 700):
        app = {"model": {f"layers.{i}.weight": torch.ones(4, 4) for i in range(number)}}
        checkpoint.save(tmp_path / f"{number}", app)
        checkpoint.load(tmp_path / f"{number}", app)
        url = tmp_path / (f"{number}" if how == "load" else f"{number}-again")
        counts.append(calls_of(lambda url=url, app=app: getattr(checkpoint, how)(url, app)))
    assert (counts[1] - counts[0]) / 400 <= MOST[how]
