"""launch/release.sh refuses what is not ready, all of it at once; the wheel has the files that it has to have."""

import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from shardopt.cli.verbs.new import FILES
from tests.support.source import ROOT

VERSION = "1.2.0"


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path):
    """A small project that promises the Python of the tests, ready for its release."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    files = {
        "launch/release.sh": (ROOT / "launch" / "release.sh").read_text(),
        "launch/test.sh": "echo tests began; exit 7\n",
        "shardopt/version.py": f'__version__ = "{VERSION}"\n',
        "pyproject.toml": f'classifiers = ["Programming Language :: Python :: {here}"]\n',
        "CHANGELOG.md": f"## [Unreleased]\n\n## [{VERSION}] - 2026-12-01\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a")
    return tmp_path


def release(folder, *arguments):
    command = ["bash", "launch/release.sh", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def test_what_is_ready_goes_on_to_its_tests(project):
    done = release(project)
    assert done.stdout == "tests began\n" and "refused" not in done.stderr and done.returncode == 7


def test_a_release_is_refused_with_all_problems_at_once(project):
    git(project, "tag", "v1.3.0.dev0")
    (project / "shardopt" / "version.py").write_text('__version__ = "1.3.0.dev0"\n')
    (project / "pyproject.toml").write_text('"Programming Language :: Python :: 3.99"\n')
    (project / "notes").write_text("")
    done = release(project)
    assert done.returncode == 1 and done.stdout == ""
    head, *problems = done.stderr.splitlines()
    assert head == "release: 1.3.0.dev0 is refused:"
    assert [problem.split(";")[0] for problem in problems] == [
        "  - the tree: found 3 files that git status lists",
        "  - shardopt/version.py: found '1.3.0.dev0'",
        "  - CHANGELOG.md: found no dated section of 1.3.0.dev0",
        f"  - the tag v1.3.0.dev0: found {commit_of(project)}",
        "  - Python 3.99: found none on this machine",
    ]


def commit_of(folder):
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("arguments", [["--without-tests"], ["--dry"]])
def test_a_release_without_tests_is_none(project, arguments):
    assert release(project, *arguments).returncode == 2


def test_the_wheel_has_what_the_package_needs_and_no_tests(tmp_path):
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    needed = re.compile(r"(shardopt|docs|launch|examples/template)/.*|pyproject\.toml|README\.md|LICENSE")
    for name in filter(needed.fullmatch, names):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name, follow_symlinks=False)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True, timeout=100)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {*archive.namelist()}
        job = archive.read("shardopt/cli/template/job.slurm")
    code = {name for name in names if re.fullmatch(r"shardopt/.*\.py", name) and (ROOT / name).exists()}
    data = {
        "shardopt/py.typed",
        "shardopt/cli/troubleshooting.md",
        *(f"shardopt/cli/template/{name}" for name in FILES),
        *(name for name in names if name.startswith("shardopt/report/page/")),
    }
    assert {name for name in packed if ".dist-info/" not in name} == code | data
    assert job == (ROOT / "launch" / "slurm.sbatch").read_bytes()
