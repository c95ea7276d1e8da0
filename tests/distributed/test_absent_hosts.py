"""A run of which some hosts are away: steps that lack files are named, stay for a while, and never return unasked."""

import logging
import shutil

import pytest
import torch.distributed as dist

from shardopt import checkpoint
from shardopt.checkpoint import Tier
from shardopt.errors import CheckpointNotFoundError
from tests.distributed.test_hosts import app_of, assert_is
from tests.harness import run_ranks


def start(root, hosts, steps=0, **options):
    """Restores on these hosts, and saves so many steps.

    Returns where it began (None in a new run), the run's branch then, the steps it passed over, and what is whole.
    """
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: "passed over" in record.getMessage())  # each host of one machine is another tier
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("shardopt.checkpoint").addHandler(handler)
    app = app_of(0)
    tier = Tier(f"{root}/host-{hosts[dist.get_rank()]}", every=1, keep_last=2, copies=2)
    with checkpoint.Manager(f"{root}/root", every=500, destinations=[tier]) as manager:
        begin = manager.restore(app, **options)
        assert_is(app, begin)
        for step in range(begin + 1, begin + 1 + steps):
            app |= app_of(step)
            manager.save(step, app)
            manager.wait()
        return manager.restored_step, manager.branch, warnings, sorted(manager.where())


def shares(root, host):
    return sorted(path.name for path in (root / f"host-{host}").glob("step-*"))


@pytest.fixture(scope="module")
def nine_steps(tmp_path_factory):
    path = tmp_path_factory.mktemp("nine_steps")
    assert run_ranks(3, start, str(path), "abc", 9)[0] == (None, 0, [], [8, 9])
    return path


@pytest.fixture
def root(nine_steps, tmp_path):
    """A run whose steps 8 and 9 are on the hosts a, b and c, two copies of each file."""
    shutil.copytree(nine_steps, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path


def test_steps_that_lack_files_are_named_and_stay_until_their_hosts_are_back(root):
    (begun, branch, warnings, _), (*_, silent, _) = run_ranks(2, start, str(root), "bd")
    assert (begun, branch, silent) == (None, 0, [])
    for step, said in zip((8, 9), warnings, strict=True):
        assert f"step {step} is passed over" in said and f"step-0000000{step}/" in said and "bring back a host" in said
    assert shares(root, "b") == ["step-00000008", "step-00000009"]
    assert run_ranks(2, start, str(root), "ab", 1)[0] == (9, 0, [], [9, 10])


def refused(root, hosts):
    with pytest.raises(CheckpointNotFoundError) as caught:
        start(root, hosts, required=True)
    return [(problem.key, problem.remedy) for problem in caught.value.problems]


def test_a_restore_that_requires_a_checkpoint_names_the_steps_that_lack_files(root):
    (of_root, *of_files), same = run_ranks(2, refused, str(root), "bd")
    assert same == [of_root, *of_files] and of_root[0] == f"{root}/root"
    assert [("step-00000008" in key, "bring back a host" in remedy) for key, remedy in of_files] == [
        (True, True),
        (False, True),
    ]
    assert len(shares(root, "b")) == 2


def begin_after_a_refusal(root, hosts):
    app, tier = app_of(1), Tier(f"{root}/host-{hosts[dist.get_rank()]}", every=1, keep_last=2, copies=2)
    with checkpoint.Manager(f"{root}/root", every=500, destinations=[tier]) as manager:
        with pytest.raises(CheckpointNotFoundError):
            manager.restore(app, required=True)
        manager.save(1, app)
        manager.wait()
        return manager.branch


def test_what_is_saved_after_a_refused_restore_is_newer_work_too(root):
    assert run_ranks(2, begin_after_a_refusal, str(root), "bd") == [1, 1]
    assert run_ranks(2, start, str(root), "bd")[0][0] == 1
    assert run_ranks(3, start, str(root), "abc")[0][:2] == (1, 1)


def test_what_hosts_bring_back_is_not_restored_in_place_of_what_the_run_saved_meanwhile(root):
    assert run_ranks(2, start, str(root), "bd", 1)[0][::3] == (None, [1])
    # With the new step there are no more than `keep_last`: the newest of those that lack files is still there.
    assert shares(root, "b") == ["step-00000001-b1", "step-00000009"]
    assert run_ranks(2, start, str(root), "bd", 1)[0] == (1, 1, [], [1, 2])
    assert shares(root, "b") == ["step-00000001-b1", "step-00000002-b1"]
    assert run_ranks(3, start, str(root), "abc")[0][:3] == (2, 1, [])  # and not 9, which a and c have completely
    assert run_ranks(2, start, str(root), "ac", step=9, branch=0)[0][:2] == (9, 2)


def rewind(root, hosts):
    tier = Tier(f"{root}/host-{hosts[dist.get_rank()]}", every=1, keep_last=2, copies=2)
    with checkpoint.Manager(f"{root}/root", every=500, destinations=[tier]) as manager:
        manager.save(1, app_of(1), force=True)
    return start(root, hosts, step=1, newer="remove")


def test_a_rewind_leaves_steps_that_lack_files_behind_at_once(root):
    begun, branch, warnings, _ = run_ranks(2, rewind, str(root), "bd")[0]
    assert (begun, branch, warnings) == (1, 1, []) and shares(root, "b") == []
    assert run_ranks(3, start, str(root), "abc")[0][:2] == (1, 1)


def save_or_delete(root, hosts):
    tier = Tier(f"{root}/host-{hosts[dist.get_rank()]}", every=1, keep_last=3)
    app = app_of(0)
    with checkpoint.Manager(f"{root}/root", every=1, destinations=[tier]) as manager:
        begin = manager.restore(app)
        if begin:
            manager.delete(2)
        for step in range(begin + 1, 3 if begin == 0 else 0):
            manager.save(step, app | app_of(step))
            manager.wait()
        return begin


def test_a_step_that_was_deleted_while_a_host_was_away_does_not_return_with_it(tmp_path):
    assert run_ranks(2, save_or_delete, str(tmp_path), "ab") == [0, 0]
    assert run_ranks(1, save_or_delete, str(tmp_path), "a") == [2]
    assert shares(tmp_path, "a") == ["step-00000001"] and len(shares(tmp_path, "b")) == 2
    assert run_ranks(2, start, str(tmp_path), "ab")[0][0] == 1
