"""`shardopt plan`: tables of files and flags, as text and JSON; sizes with units; wrong calls."""

import json

import pytest
import torch

from shardopt.cli import main
from shardopt.nn import Grid, Table, plan_tables

JOB = ["--ranks", "4", "--memory", "16GB", "--batch", "1024", "--algorithm", "row_wise_adagrad"]
TOML = """
[[tables]]
name = "items"
rows = 10_000_000
dim = 64
pooling = 20

[[tables]]
name = "country"
rows = 200
dim = 16
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "tables.toml").write_text(TOML)
    return str(tmp_path / "tables.toml")


def test_the_plan_is_that_of_plan_tables(file, capsys):
    assert main(["plan", file, "--table", "users:1000000:32:bfloat16", *JOB, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    tables = [
        Table("items", 10_000_000, 64),
        Table("country", 200, 16),
        Table("users", 1_000_000, 32, dtype=torch.bfloat16),
    ]
    pooling = {"items": 20, "country": 1, "users": 1}
    found = plan_tables(tables, 4, 16 * 10**9, batch=1024, pooling=pooling, algorithm="row_wise_adagrad")
    cuts = [each["cut"] for each in printed["tables"]]
    cuts = [cut if isinstance(cut, str) else Grid(cut["rows"], cut["columns"], tuple(cut["ranks"])) for cut in cuts]
    assert cuts == [table.cut for table in found.tables]
    assert [each["why"] for each in printed["tables"]] == [*found.why.values()]
    assert (tuple(printed["bytes_per_rank"]), tuple(printed["seconds_per_rank"])) == (
        found.bytes_per_rank,
        found.seconds_per_rank,
    )


def test_it_prints_tables_and_ranks(file, capsys):
    assert main(["plan", file, *JOB]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line] == ["table", "items", "country", "rank", "0", "1", "2", "3"]


def test_json_files_are_read(tmp_path, capsys):
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({"tables": [{"name": "a", "rows": 9, "dim": 4, "dtype": "float16"}]}))
    assert main(["plan", str(path), *JOB]) == 0
    assert "whole on rank 0: 108 B" in capsys.readouterr().out  # with 4 bytes of state a row


@pytest.mark.parametrize(("memory", "status"), [("2.6MB", 0), ("2.4MiB", 1), ("2.5 mib", 0), ("2600000", 0)])
def test_memory_has_units(memory, status, capsys):
    job = ["--ranks", "1", "--memory", memory, "--batch", "8", "--algorithm", "sgd"]
    assert main(["plan", "--table", "a:10000:64:float32", *job]) == status
    assert ("2.6 MB for weights" in capsys.readouterr().err) == (status == 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*JOB], "tables: found none"),
        (["--table", "a:1", *JOB], "found 'a:1'; required NAME:ROWS:DIM"),
        (["--table", "a:0:4:int8", *JOB], "a: found dtype 'int8'"),
        (["--table", "a:1:4", "--table", "a:1:4", *JOB], "found 2 with 1 names"),
        (["--table", "a:1:4", *JOB, "--memory", "1XB"], "found '1XB'"),
        (["--table", "a:1:4", *JOB, "--memory", "10000000TB"], "required at most 1,000,000 TB"),
        (["--table", "a:1:4", *JOB, "--memory", "9" * 400], "required at most 1,000,000 TB"),
        (["--table", f"a:{10**20}:4", *JOB], "required at most 1e+15 elements"),
        (["--table", f"a:{'9' * 5000}:4", *JOB], "required NAME:ROWS:DIM"),
        (["--table", "a:1:4", *JOB, "--algorithm", "adamw"], "found 'adamw'; required one of sgd"),
        (["--table", "a:1:4", *JOB, "--ranks", "0", "--batch", "0"], "batch: found 0.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_call_says_what_is_wrong(arguments, words, capsys):
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[tables]]\nname = 'a'\nrows = 9\ndim = 4\ndtype = ['float32']", "found dtype ['float32']"),
        (f"[[tables]]\nname = 'a'\nrows = 9\ndim = 4\npooling = {10**400}", "a number above 0"),
        ("x", "mend the file"),
        ("a = 1", "no list `tables`"),
        ("é", "utf-8"),
        ("[[tables]]\nname = 'a'\nrow = 4", "the keys name, row"),
    ],
)
def test_a_wrong_file_is_refused(text, words, tmp_path, capsys):
    (tmp_path / "wrong.toml").write_bytes(text.encode("latin-1"))
    assert main(["plan", str(tmp_path / "wrong.toml"), *JOB]) == 2
    assert words in capsys.readouterr().err
