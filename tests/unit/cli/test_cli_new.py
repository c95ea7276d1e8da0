"""`shardopt new`: what it writes, what it refuses, and that the program resumes on a different number of ranks."""

import contextlib
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from shardopt import checkpoint
from shardopt.cli import main
from shardopt.cli.verbs.new import FILES
from tests.docs.blocks import ROOT, blocks_of
from tests.harness import run_ranks, run_ranks_outcomes

TEMPLATE = ROOT / "examples" / "template"


def test_the_files_of_the_template_are_written_with_the_name_of_the_run(tmp_path, capsys):
    assert main(["new", str(tmp_path / "my-run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"directory": str(tmp_path / "my-run"), "files": [*FILES]}
    for name in FILES:
        written = (tmp_path / "my-run" / name).read_text()
        assert written == (TEMPLATE / name).read_text().replace("{{name}}", "my-run") and "{{" not in written
    assert 'out = "out/my-run"' in (tmp_path / "my-run" / "config.toml").read_text()


def test_all_files_of_the_template_are_written():
    files = {path for path in TEMPLATE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert files == {TEMPLATE / name for name in FILES}


def test_an_empty_directory_is_taken(tmp_path):
    assert main(["new", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("name", "found"), [("full", "1 files in"), ("file", "a file at"), ("my run", "'my run'"), ('a"b', "'a\"b'")]
)
def test_other_directories_are_refused_and_left_as_they_are(name, found, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "train.py").write_text("mine")
    (tmp_path / "file").write_text("")
    before = {*tmp_path.rglob("*")}
    assert main(["new", str(tmp_path / name)]) == 2
    assert f"DIR: found {found}" in capsys.readouterr().err
    assert {*tmp_path.rglob("*")} == before and (tmp_path / "full" / "train.py").read_text() == "mine"


def parts_of_recipes():
    """(page, lines) of each part of the program below a comment that names a page.

    A part ends at an empty line, at a comment, or at a line that is less indented.
    """
    lines = (TEMPLATE / "train.py").read_text().splitlines()
    for number, line in enumerate(lines):
        if re.fullmatch(r" *# docs/\S+\.md", line):
            rest, indent = lines[number + 1 :], line[: line.index("#")]
            end = next(i for i, each in enumerate(rest) if not re.match(rf"{indent} *[^\s#]", each))
            yield line.strip("# "), [each.strip() for each in rest[:end]]


PARTS = [*parts_of_recipes()]


@pytest.mark.parametrize(("page", "part"), PARTS, ids=[f"{page}: {part[0]}" for page, part in PARTS])
def test_a_part_that_names_a_page_has_the_text_of_that_page(page, part):
    """But for annotations of types, which pages leave out."""
    wanted = [re.sub(r"^app: dict\[str, Any\]", "app", line) for line in part]
    blocks = [[line.strip() for line in block.text.splitlines()] for block in blocks_of(ROOT / page)]
    assert any(block[i : i + len(wanted)] == wanted for block in blocks for i in range(len(block))), wanted


def program_in(folder):
    spec = importlib.util.spec_from_file_location("train", folder / "train.py")
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    return train


def _train(folder, steps, resume, die_at=None):
    """Trains on this rank; returns what the program printed. Rank 1 dies at a step, once the last save is complete."""
    train = program_in(folder)
    save = checkpoint.Manager.save

    def save_and_die(manager, step, app, **options):
        save(manager, step, app, **options)
        if step == die_at:
            manager.wait()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.Manager.save = save_and_die
    text = (folder / "config.toml").read_text().replace('"out/', f'"{folder}/out/').replace("every = 50", "every = 10")
    (folder / f"{dist.get_rank()}.toml").write_text(text.replace("steps = 200", f"steps = {steps}"))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train.train(train.read_config(folder / f"{dist.get_rank()}.toml"), torch.device("cpu"), resume, False)
    return printed.getvalue()


def losses_in(printed):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", printed)}


def test_a_run_that_lost_a_rank_resumes_on_three_with_the_same_losses(tmp_path):
    for name in ("whole", "killed"):
        assert main(["new", str(tmp_path / name)]) == 0
    whole = losses_in(run_ranks(1, _train, tmp_path / "whole", 20, False)[0])
    killed = run_ranks_outcomes(2, _train, tmp_path / "killed", 20, False, die_at=15)
    assert killed[1].signal is signal.SIGKILL
    resumed = losses_in(run_ranks(3, _train, tmp_path / "killed", 20, True)[0])
    assert [*whole] == [10, 20]
    assert resumed == {20: pytest.approx(whole[20], rel=1e-5)}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_run_saves_and_stops_after_either_signal(tmp_path, signum):
    """As its README says of `kill` and Ctrl-C, which torchrun passes on."""
    assert main(["new", str(tmp_path)]) == 0
    assert run_ranks(1, _stopped, tmp_path, signum) == [128 + signum]
    assert checkpoint.Manager(f"{tmp_path}/checkpoints").steps() == [3]


def _stopped(folder, signum):
    """Returns the status with which a run ends after a signal. A process of its own, as it goes on listening."""
    config = program_in(folder).read_config(folder / "config.toml").model_copy(update={"out": str(folder)})
    with program_in(folder).make_manager(config) as manager, pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signum)
        manager.save(3, {"step": 3})
    return ended.value.code


def test_a_directory_in_the_home_directory_is_made_there(tmp_path, monkeypatch):
    """As where a quoted `~` reaches it. It made a directory of this name."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert main(["new", "~/my-run"]) == 0
    assert (tmp_path / "home" / "my-run" / "train.py").exists() and not (tmp_path / "~").exists()


@pytest.mark.exhaustive
def test_a_run_does_not_begin_where_checkpoints_are(tmp_path):
    assert main(["new", str(tmp_path / "run")]) == 0
    run_ranks(1, _train, tmp_path / "run", 10, False)
    before = {*tmp_path.rglob("*")}
    (outcome,) = run_ranks_outcomes(1, _train, tmp_path / "run", 10, False)
    assert "found checkpoints; required none: add --resume" in str(outcome.error)
    assert {*tmp_path.rglob("*")} == before


def test_wrong_settings_are_named(tmp_path):
    assert main(["new", str(tmp_path / "run")]) == 0
    text = (tmp_path / "run" / "config.toml").read_text().replace("lr = 1e-3", 'lr = "fast"') + "kep = 3\n"
    (tmp_path / "run" / "config.toml").write_text(text)
    with pytest.raises(SystemExit) as caught:
        program_in(tmp_path / "run").read_config(tmp_path / "run" / "config.toml")
    assert "optimizer.lr: found 'fast'" in str(caught.value) and "checkpoints.kep: found 3" in str(caught.value)


def test_a_package_that_tensorboard_needs_is_named_before_the_job_is_joined(tmp_path, monkeypatch, capsys):
    assert main(["new", str(tmp_path / "run")]) == 0
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("sys.argv", ["train.py", str(tmp_path / "run" / "config.toml"), "--tensorboard"])
    with pytest.raises(SystemExit):
        program_in(tmp_path / "run").main.__wrapped__()  # without `record`, which takes over faulthandler
    assert "--tensorboard: found no package of this name: pip install tensorboard" in capsys.readouterr().err


@pytest.mark.exhaustive  # starts torchrun five times
@pytest.mark.timeout(600)
def test_the_tests_of_the_program_pass(tmp_path):
    assert main(["new", str(tmp_path / "my-run")]) == 0
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", ".", "tests"]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path / "my-run", env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
