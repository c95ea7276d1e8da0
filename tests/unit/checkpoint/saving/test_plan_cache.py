"""Plans of earlier saves, which the threads of a process share."""

import importlib
import threading

import torch

from shardopt import checkpoint

save_module = importlib.import_module("shardopt.checkpoint.saving.save")


def save(folder, name):
    checkpoint.save(str(folder / name), {name: torch.zeros(2)}, durable=False)


def test_saves_of_other_threads_leave_a_save_its_plan(tmp_path, monkeypatch):
    """They used to drop it as the oldest, between the report that it was kept and its use: a KeyError."""
    monkeypatch.setattr(save_module, "_plans", {})
    compare, main = save_module.compare_reports, threading.current_thread()

    def compare_slowly(reports):
        if threading.current_thread() is main:
            other = threading.Thread(target=lambda: [save(tmp_path / "other", name) for name in "bcd"])
            other.start()
            other.join()
        return compare(reports)

    save(tmp_path / "first", "a")
    monkeypatch.setattr(save_module, "compare_reports", compare_slowly)
    save(tmp_path / "last", "a")
    checkpoint.load(str(tmp_path / "last" / "a"), {"a": torch.zeros(2)})
    assert len(save_module._plans) == 2
