"""Ranks that stay for the next function of their file, and what has them replaced."""

import logging
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from shardopt import errors
from tests.harness import RanksFailed, run_ranks, run_ranks_outcomes
from tests.harness.programs import run_program
from tests.harness.traces import Traces
from tests.unit.project import test_harness as another_file

RANKS_STAY = True


def processes():
    dist.barrier()
    return os.getpid()


@pytest.fixture
def before():
    return run_ranks(2, processes)


def test_the_next_function_runs_in_the_same_processes(before):
    assert run_ranks(2, processes) == before
    assert not {*run_ranks(3, processes)} & {*before}
    assert run_ranks(2, processes) == before


def test_other_files_outcomes_and_faults_have_ranks_of_their_own(before):
    assert not {outcome.value for outcome in run_ranks_outcomes(2, processes)} & {*before}
    assert run_ranks(2, processes) == before
    run_ranks(2, another_file.all_reduce, 1.0)
    assert run_ranks(2, processes) == before  # which are of this file alone


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ZeroDivisionError


def test_after_a_failure_they_are_new(before):
    with pytest.raises(RanksFailed, match="ZeroDivisionError"):
        run_ranks(2, fail_on, 1)
    assert not {*run_ranks(2, processes)} & {*before}


def left(what):
    if what == "a thread":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    if what == "a handler":
        logging.getLogger().addHandler(logging.NullHandler())
    if what == "a dtype":
        torch.set_default_dtype(torch.float64)
    if what == "no group":
        dist.destroy_process_group()


@pytest.mark.parametrize("what", ["a thread", "a handler", "a dtype", "no group"])
def test_where_something_is_left_they_are_new(before, what):
    run_ranks(2, left, what)
    assert not {*run_ranks(2, processes)} & {*before}


def surroundings():
    return os.environ.get("SOMETHING"), os.getcwd(), torch.rand(1).item()


def test_environment_directory_and_random_numbers_are_those_of_the_call(before, monkeypatch, tmp_path):
    (first, *_) = run_ranks(2, surroundings)
    monkeypatch.setenv("SOMETHING", "new")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(2, surroundings) == [("new", str(tmp_path), first[2])] * 2
    assert run_ranks(2, processes) == before


def test_a_replaced_name_is_found_where_names_are_looked_at(monkeypatch):
    traces = Traces(names=True)
    traces.begin()
    assert traces.left() == ""
    with monkeypatch.context() as patch:
        patch.setattr(errors, "StateError", None)
        assert traces.left() == "shardopt.errors.StateError"
        patch.undo()
        patch.setattr(Traces, "begin", None)
        assert traces.left() == "tests.harness.traces.Traces.begin"
    assert traces.left() == ""


@pytest.mark.parametrize(("last", "code", "says"), [("", 0, ""), ("exit(3)", 3, ""), ("1 / 0", 1, "ZeroDivisionError")])
def test_a_program_ends_as_under_an_interpreter_of_its_own(last, code, says):
    source = """
import atexit, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
class Ends:
    def __del__(self, write=print):
        write("taken down")
ends = Ends()
print(sys.argv[1:], __name__)
"""
    ended = run_program(source + last, "a", "b")
    printed = "['a', 'b'] __main__\nthread\nat exit\ntaken down\n"
    assert (ended.returncode, ended.stdout) == (code, printed), ended.stderr
    # Nothing else that is printed at the end counts: some releases of triton, which is preloaded, tell of leaks there.
    assert says in ended.stderr and ("Traceback" in ended.stderr) == bool(says)
