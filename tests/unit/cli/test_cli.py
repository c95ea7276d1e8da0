"""The command line as a whole: its parser, statuses and errors; the verbs that need no file of tests of their own."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.storage import open as storage_open
from shardopt.cli import main
from shardopt.cli.parser import put_flags
from shardopt.cli.table import VERBS
from shardopt.errors import MismatchError, Problem
from tests.support.source import ROOT


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "saved"
    app = {"model": {"w": torch.arange(6.0).view(2, 3)}, "step": 7, "seed": checkpoint.PerRank(3)}
    checkpoint.save(path, app)
    return path


def test_a_module_of_the_working_directory_is_imported_first(saved, tmp_path, monkeypatch, capsys):
    url = f"owncli://{saved}"
    assert main(["verify", url]) == 1
    assert "--import MODULE" in capsys.readouterr().err
    (tmp_path / "owncli.py").write_text(
        "from shardopt.checkpoint.storage import LocalStorage, register_storage\n"
        "register_storage('owncli', lambda url: LocalStorage(url.removeprefix('owncli://')))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(storage_open, "_own", {})
    assert main(["verify", url, "--import", "owncli"]) == 0
    assert main(["verify", url, "--import", "nowhere"]) == 2
    assert "--import: found 'nowhere', at which: No module named 'nowhere'" in capsys.readouterr().err
    assert main(["explain", "no-checkpoint", "--import", "owncli"]) == 0


def test_verbs_take_what_is_declared(saved, tmp_path, capsys):
    """An argument, several, a switch, an option that may be given twice, a verb of two words."""
    other = tmp_path / "other"
    checkpoint.save(other, {"model": {"v": torch.arange(6.0).view(2, 3)}, "step": 7, "seed": checkpoint.PerRank(3)})
    assert main(["show", str(saved), "--flat", "--glob", "model.*"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["model.w  float32 [2, 3]"]
    assert main(["verify", str(saved), str(other)]) == 0
    assert capsys.readouterr().out.count("every byte is as it was written") == 2
    assert main(["diff", str(saved), str(other), "--rename", "w$=u", "--rename", "u$=v"]) == 0
    assert main(["plot", "layout", str(saved), "-o", str(tmp_path / "x.gif")]) == 2
    assert "found" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["show"],
        ["show", "a", "b", "c"],
        ["show", "a", "--depth", "x"],
        ["reshard", "a", "b"],
        ["verify"],
        ["plot"],
        ["plot", "layout", "a"],
        ["ls", "a", "--nonsense"],
        ["prune", "a", "--keep-last", "1", "--ye"],  # an abbreviation
    ],
    ids=" ".join,
)
def test_a_wrong_call_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith("usage: shardopt") and said.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "a", "--regex", "["],
        ["show", "a", "--depth", "0"],
        ["diff", "a", "b", "--rename", "x"],
        ["diff", "a", "b", "--rename", "(=x"],
        ["diff", "a", "b", "--rename", r"x=\9"],
        ["diff", "a", "b", "--select", "["],
        ["prune", "a", "--keep-last", "0"],
        ["prune", "a", "--keep-last", "2", "--best", "loss"],
        ["prune", "a", "--keep-last", "2", "--best", "loss:least:2"],
        ["prune", "a"],
        ["prune", "a", "--keep-seconds", "0"],
        ["prune", "a", "--keep-seconds", "nan"],
        ["ls", "a", "--keep-every", "5"],
        ["reshard", "a", "b", "--world-size", "0"],
        ["convert", "a", "b", "--to", "dcp", "--dtype", "int8"],
        ["plot", "layout", "a", "-o", "a.png", "--world-size", "0"],
    ],
    ids=" ".join,
)
def test_options_that_cannot_be_meant_are_status_2(arguments, saved, capsys):
    if arguments[0] == "plot":
        pytest.importorskip("matplotlib")
    arguments = [str(saved) if each in ("a", "b") else each for each in arguments]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("shardopt: ") and "found" in said and said.count("\n") == 1


def test_help_and_version(capsys):
    for arguments in (["--help"], ["plot", "--help"], *([*verb.name.split(), "--help"] for verb in VERBS)):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith("usage: shardopt")
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"shardopt {shardopt.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["shwo", "a"], "show"),
        (["plot", "layuot", "a"], "layout"),
        (["ls", "a", "--verfy"], "--verify"),
        (["ls", "a", "--keep_last=2"], "--keep-last"),
        (["--verison"], "--version"),
        (["xyzzy"], None),
    ],
    ids=str,
)
def test_what_is_misspelt_is_told_with_what_is_near(arguments, meant, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"; did you mean {meant}?") if meant else "did you mean" not in last


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["prune", "a", "--keep-last", "0", "--keep-every", "-1"], ["--keep-last: found 0", "--keep-every: found -1"]),
        (["reshard", "a", "b", "--world-size", "2"], ["pass --drop-per-rank"]),
        (["convert", "a", "b", "--to", "torch"], ["--drop-per-rank, or --skip"]),
        (
            ["convert", "a", "b", "--to", "torch", "--drop-per-rank", "--select", "none"],
            ["--select 'none', --skip None:"],
        ),
        (
            ["convert", "a", "b", "--to", "dcp", "--drop-per-rank", "--max-file-bytes", "0"],
            ["--max-file-bytes: found 0"],
        ),
    ],
    ids=lambda each: " ".join(each),
)
def test_remedies_name_flags(arguments, flags, saved, tmp_path, capsys):
    """As they are typed in the shell, and not the arguments of the calls."""
    places = {"a": str(saved), "b": str(tmp_path / "b")}
    assert main([places.get(each, each) for each in arguments]) in (1, 2)
    said = capsys.readouterr().err
    assert [flag for flag in flags if flag not in said] == [], said


def test_flags_are_put_for_arguments_alone():
    """Not into paths, stored keys, or words of a sentence."""
    problems = [
        Problem("select='x', skip='y'", "nothing", "a key", "select others, or leave some out with skip=..., a regex"),
        Problem("/runs/skip=3/drop_per_rank", "drop_per_rank", "none", "drop_per_rank=True, or keep-world_size_2"),
        Problem("model.select", "nothing", "a key", "set max_file_bytes"),
    ]
    error = MismatchError("no", problems)
    (convert,) = [verb for verb in VERBS if verb.name == "convert"]
    put_flags(error, convert.arguments)
    assert [(each.key, each.remedy) for each in error.problems] == [
        ("--select 'x', --skip 'y'", "select others, or leave some out with --skip ..., a regex"),
        ("/runs/skip=3/drop_per_rank", "--drop-per-rank, or keep-world_size_2"),
        ("model.select", "set --max-file-bytes"),
    ]


@pytest.mark.parametrize(("key", "meant"), [("model.ww", "model.w"), ("sed", "seed"), ("modle", "model")])
def test_a_misspelt_key_is_answered_with_what_is_near(key, meant, saved, capsys):
    assert main(["show", str(saved), key]) == 1
    assert f"did you mean {meant}" in capsys.readouterr().err
    with checkpoint.open(saved) as reader, pytest.raises(MismatchError, match=r"did you mean model\.w\?"):
        reader.read("model.ww")


WITHOUT_TORCH = """
import os, sys
from shardopt.cli import main
for line in ("--help", "--version", "show", "show --help", "plot run --help", "nonsense", "ls a --nonsense"):
    try:
        main(line.split())
    except SystemExit:
        pass
heavy = {"torch", "numpy", "fsspec", "matplotlib"} & sys.modules.keys()
sys.exit(f"imported: {heavy}" if heavy else 0)
"""


def test_nothing_heavy_is_imported_where_it_is_not_needed():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("shardopt res", ["reshard"]),
        ("shardopt plot ", ["layout", "run"]),
        ("shardopt ls /somewhere --keep", ["--keep-every", "--keep-last", "--keep-seconds"]),
    ],
)
def test_a_shell_completes_verbs_and_options_without_torch(line, completions, tmp_path):
    """As bash asks for it: by variables, and for an answer in a file."""
    pytest.importorskip("argcomplete", reason="the extra `cli` is not installed")
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    program = "import sys; sys.modules['torch'] = None; from shardopt.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | asked, timeout=120)
    words = {word.strip() for word in answer.read_text().splitlines()} - {"-h", "--help"}
    assert (done.returncode, words) == (0, {*completions})


def test_without_the_extra_the_verbs_print_the_same(saved, capsys, monkeypatch):
    """That they import nothing of it elsewhere is seen in test_without_torch.py."""
    calls = [["show", str(saved)], ["show", str(saved), "model.w"], ["verify", str(saved)], ["ls", str(saved)]]
    assert max(map(main, calls)) == 0
    printed = capsys.readouterr().out
    for name in ("argcomplete", "rich", "rich.console", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)
    assert max(map(main, calls)) == 0
    assert capsys.readouterr().out == printed != ""


def test_a_pipe_that_closes_is_no_error(tmp_path):
    checkpoint.save(tmp_path / "c", {f"w{i}x{i}": torch.tensor(i) for i in range(5000)})
    line = f'"{sys.executable}" -m shardopt.cli show {tmp_path}/c --flat | head -1; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[0].startswith(f"{tmp_path}/c: saved by")
    assert (done.stdout.splitlines()[1:], done.stderr) == (["141"], "")


@pytest.mark.parametrize("call", [["show"], ["show", "--json"], ["verify"]])
def test_what_cannot_be_written_is_said_once(saved, call, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as after >&-
    assert main([*call, str(saved)]) == 0
    for where in (saved, saved / "none"):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            assert main([*call, str(where)]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines.count("shardopt: cannot write to stdout: No space left on device") == (
            where == saved or "--json" in call
        )


HANGING = """
import sys, time
from shardopt.cli import main
from shardopt.cli.verbs import show
def hang(url):
    print("in", flush=True)
    time.sleep(60)
show.storage_of = hang
sys.exit(main(["show", "somewhere"]))
"""


def test_ctrl_c_ends_quietly():
    command = [sys.executable, "-c", HANGING]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "in\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_errors_are_one_line_that_names_what_explains_it_and_one_document(tmp_path, capsys):
    url = str(tmp_path / "nowhere")
    for arguments in (["show", url], ["diff", url, url], ["ls", url], ["prune", url, "--keep-last", "1"]):
        assert main(arguments) == 1
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("shardopt: there is no")
        assert said.err.endswith(" [shardopt explain no-checkpoint]\n")
        assert main([*arguments, "--json"]) == 1
        error = json.loads(capsys.readouterr().out)["error"]
        assert (error["type"], error["code"]) == ("CheckpointNotFoundError", "no-checkpoint")
    assert main(["show", "nonsense://x"]) == 1
    assert "the protocol 'nonsense'" in capsys.readouterr().err


def test_verify_continues_after_one_that_is_not_there(saved, tmp_path, capsys):
    assert main(["verify", str(tmp_path / "nowhere"), "nonsense://x", str(saved), "--json"]) == 1
    first, other, second = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (first["ok"], first["error"]["type"]) == (False, "CheckpointNotFoundError")
    assert (other["ok"], other["error"]["code"]) == (False, "storage-failed")
    assert (second["ok"], second["tensors"], second["problems"]) == (True, 1, [])


def test_verify_takes_a_root_or_a_pattern_beside_a_save_under_way(tmp_path, capsys):
    """`verify ROOT/step-*` used to fail on healthy runs: of metrics, and of the save under way."""
    with checkpoint.Manager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"x": torch.ones(3)})
        manager.add_metrics(2, {"loss": 1.0})
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "0123456789ab-r00000.safetensors").write_bytes(b"x")
    (tmp_path / "step-00000004").mkdir()
    pattern = sorted(map(str, tmp_path.glob("step-*")))
    assert main(["verify", *pattern]) == 0
    said = capsys.readouterr()
    assert "step-00000002.metrics.json: metrics of a step" in said.out and said.err == ""
    assert "step-00000003: no manifest: a save is under way" in said.out
    assert main(["verify", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [each["ok"] for each in found] == [True, True, None, None]
    assert main(["verify", str(tmp_path / "step-00000003")]) == 1  # nothing is complete
    assert main(["verify", str(tmp_path), str(tmp_path / "step-00000009")]) == 1  # one is missing
    (tmp_path / "step-00000005").symlink_to(tmp_path / "archive")  # which is away
    assert main(["verify", str(tmp_path)]) == 1
    (tmp_path / "step-00000005").unlink()
    other = tmp_path / "copy" / "step-00000001"  # without its manifest: no save is under way there
    shutil.copytree(tmp_path / "step-00000001", other, ignore=lambda *_: ["manifest.json"])
    assert main(["verify", *pattern, str(other)]) == 1
    (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
    assert main(["verify", *pattern]) == 1


def test_verify_says_that_a_removed_step_is_a_base(tmp_path, capsys):
    w = torch.zeros(64, 64)
    with checkpoint.Manager(tmp_path, keep=1, incremental=True) as manager:
        for step in (1, 2, 3):
            w[step] = 1
            manager.save(step, {"w": w, "same": torch.ones(64, 64)})
    assert main(["verify", str(tmp_path)]) == 0
    assert "step-00000001: no manifest: a removed step, of which later ones need these files" in capsys.readouterr().out


def test_verify_takes_no_step_for_damaged_that_retention_removes_meanwhile(tmp_path, monkeypatch, capsys):
    from shardopt.checkpoint.converting import verify

    inner, to_save = verify._check_file, []

    def check(*arguments):
        while to_save:
            manager.save(to_save.pop(), {"x": torch.ones(3)})
        return inner(*arguments)

    monkeypatch.setattr(verify, "_check_file", check)
    with checkpoint.Manager(tmp_path, keep=2) as manager:
        for step in (1, 2):
            manager.save(step, {"x": torch.ones(3)})
        steps = sorted(map(str, tmp_path.glob("step-*")))  # which the shell has put in the place of a pattern
        to_save.append(3)
        assert main(["verify", *steps, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["checkpoints"]
        assert [(each["url"][-1], each["ok"]) for each in found] == [("2", True), ("1", None)]
        for gone in (steps[0], str(tmp_path / "step-00000004")):  # not there at the beginning
            assert main(["verify", gone, steps[1]]) == 1
            assert f"{gone}: found nothing; required a committed checkpoint" in capsys.readouterr().err
        to_save.append(4)
        assert main(["verify", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "step-00000002: no manifest: a save is under way, or broke off, or it was removed" in said.out
    assert said.err == "" and main(["verify", steps[0]]) == 1 and "there is no checkpoint" in capsys.readouterr().err


def test_verify_tells_of_damage_by_its_status(saved, capsys):
    assert main(["verify", str(saved)]) == 0
    assert "every byte is as it was written" in capsys.readouterr().out
    (name,) = (name for name in os.listdir(saved) if name.endswith(".safetensors"))
    with open(saved / name, "r+b") as file:
        file.seek(4096 + 5)
        byte = file.read(1)
        file.seek(4096 + 5)
        file.write(bytes([byte[0] ^ 1]))
    assert main(["verify", str(saved)]) == 1
    output = capsys.readouterr()
    assert "model.w" in output.err and "damaged in 1 place" in output.out


def test_reshard_writes_what_loads(saved, tmp_path, capsys):
    target = tmp_path / "for-three"
    assert main(["reshard", str(saved), str(target), "--world-size", "3"]) == 1
    assert "values of 1 ranks; required 3 ranks" in capsys.readouterr().err
    assert main(["reshard", str(saved), str(target), "--world-size", "3", "--drop-per-rank"]) == 0
    with checkpoint.open(target) as reader:
        assert reader.manifest.world_size == 3
        assert torch.equal(reader.read("model.w"), torch.arange(6.0).view(2, 3))


@pytest.mark.exhaustive
def test_a_terminal_gets_a_progress_bar(saved):
    pytest.importorskip("rich")
    controller, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "shardopt.cli", "verify", str(saved)]
    done = subprocess.run(command, stderr=terminal, stdout=subprocess.PIPE, env=environment, timeout=120)
    os.close(terminal)
    assert done.returncode == 0 and b"every byte" in done.stdout
    assert b"verifying" in os.read(controller, 65536)
    os.close(controller)
