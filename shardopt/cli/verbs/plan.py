"""`shardopt plan`: plans the cuts of embedding tables, from a file or from flags; needs no torch."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardopt.cli.output import Output
from shardopt.errors import OptionError, Problem
from shardopt.nn.plan.costs import EXCHANGE_BANDWIDTH, MEMORY_BANDWIDTH, NARROWEST, PIECE_SECONDS, TableSize
from shardopt.nn.plan.solution import DTYPE_BYTES, STATES, by_table, checked_job, refuse, solve, travel_bytes

_UNITS = {"": 1, **{f"{letter}B": 1000**power for power, letter in enumerate(("", "k", "M", "G", "T"))}}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_MOST_BYTES, _MOST_ELEMENTS = 10**18, 10**15  # so that sums of bytes are far below 2^63
_KEYS = {"name", "rows", "dim", "dtype", "pooling"}


def plan(
    output: Output,
    *,
    file: str | None,
    table: Sequence[str],
    ranks: int,
    memory: str,
    batch: float,
    pooling: float,
    algorithm: str,
    skew: float,
    exchange_bandwidth: str | None,
    memory_bandwidth: str | None,
) -> int:
    """Prints the plan of the tables in `file` and of those given by flags."""
    problems: list[Problem] = []
    tables = [*(_in_file(file) if file else []), *(_of_flag(each) for each in table)]
    problems += [problem for each in tables for problem in _wrong(each)]
    names = [str(each.get("name")) for each in tables]
    if not tables or len(set(names)) < len(names):
        found = "none" if not tables else f"{len(names)} with {len(set(names))} names"
        problems.append(Problem("tables", found, "at least one, each name once", "give a file, or --table"))
    state = STATES.get(algorithm.lower().replace("_", ""))
    if state is None:
        problems.append(Problem("--algorithm", repr(algorithm), f"one of {', '.join(STATES)}", "choose one of them"))
    refuse(problems)
    assert state is not None
    dtypes = [str(each.get("dtype", "float32")) for each in tables]
    figures = (
        EXCHANGE_BANDWIDTH if exchange_bandwidth is None else _size("--exchange-bandwidth", exchange_bandwidth),
        MEMORY_BANDWIDTH if memory_bandwidth is None else _size("--memory-bandwidth", memory_bandwidth),
    )
    available = _size("--memory", memory)
    of_pieces = PIECE_SECONDS, NARROWEST
    job = checked_job(ranks, available, batch, travel_bytes(dtypes), *figures, *of_pieces, problems)
    ids = {name: each.get("pooling", pooling) for name, each in zip(names, tables, strict=True)}
    ids = by_table("pooling", ids, names, 0, problems)
    skews = by_table("skew", skew, names, 0, problems)
    refuse(problems)
    assert job is not None
    sizes = [
        TableSize(
            *(each["name"], each["rows"], each["dim"], DTYPE_BYTES[dtype], ids[each["name"]], skews[each["name"]]),
            *(state[0] * DTYPE_BYTES[dtype], state[1] * max(DTYPE_BYTES[dtype], 4)),
            is_pooled=DTYPE_BYTES[dtype] >= 4,
        )
        for each, dtype in zip(tables, dtypes, strict=True)
    ]
    solution = solve(sizes, job)
    output.table(solution.lines())
    planned = [
        {
            "name": name,
            "cut": shape.name or {"rows": shape.rows, "columns": shape.columns, "ranks": shape.ranks},
            "why": solution.why[name],
        }
        for name, shape in zip(names, solution.shapes, strict=True)
    ]
    output.data(
        {
            "tables": planned,
            "bytes_per_rank": solution.bytes_per_rank,
            "seconds_per_rank": solution.seconds_per_rank,
            "bound_seconds": solution.bound,
        }
    )
    return 0


def _in_file(path: str) -> list[dict[str, Any]]:
    """Returns the entries of `tables` in a TOML or JSON file. Raises OptionError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        document: Any = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(path, str(error), "TOML, or JSON in a file named .json", "mend the file") from error
    tables = document.get("tables") if isinstance(document, Mapping) else None
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise _refusal(path, "no list `tables`", "[[tables]] with name, rows and dim", "add the tables")
    return tables


def _of_flag(text: str) -> dict[str, Any]:
    """Returns a table of NAME:ROWS:DIM[:DTYPE]. Raises OptionError."""
    parts = re.fullmatch(r"([^:]+):(\d{1,99}):(\d{1,99})(?::(\w+))?", text)
    if parts is None:
        raise _refusal("--table", repr(text), "NAME:ROWS:DIM or NAME:ROWS:DIM:DTYPE", "write items:1000000:64")
    return {"name": parts[1], "rows": int(parts[2]), "dim": int(parts[3]), "dtype": parts[4] or "float32"}


def _wrong(table: Mapping[str, Any]) -> list[Problem]:
    name, dtype = table.get("name"), table.get("dtype", "float32")
    key = name if isinstance(name, str) and name else "tables"
    problems = []
    if not isinstance(name, str) or not name or table.keys() - _KEYS:
        keys = f"{', '.join(sorted(_KEYS))}, of which name, rows and dim must be there"
        problems.append(Problem(key, f"the keys {', '.join(sorted(table))}", keys, "mend the table"))
    for size in ("rows", "dim"):
        value = table.get(size)
        if type(value) is not int or value < 1:
            problems.append(Problem(key, f"{size} {value!r}", "an int of at least 1", f"give its {size}"))
    if not problems and table["rows"] * table["dim"] > _MOST_ELEMENTS:
        found = f"{table['rows']} rows of {table['dim']}"
        problems.append(Problem(key, found, f"at most {_MOST_ELEMENTS:.0e} elements", "give its rows and dim"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        problems.append(Problem(key, f"dtype {dtype!r}", f"one of {', '.join(DTYPE_BYTES)}", "choose one of them"))
    return problems


def _size(flag: str, text: str) -> int:
    """Returns the bytes of a text such as "80GB" or "64 GiB". Raises OptionError."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(\w*)", text.strip())
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if parts is None or parts[2].lower() not in units:
        raise _refusal(flag, repr(text), f"a number and one of {', '.join(filter(None, _UNITS))}", "write 80GB")
    found = float(parts[1]) * units[parts[2].lower()]
    if found > _MOST_BYTES:
        raise _refusal(flag, repr(text), f"at most {_MOST_BYTES / 1000**4:,.0f} TB", "write 80GB")
    return int(found)


def _refusal(key: str, found: str, required: str, remedy: str) -> OptionError:
    return OptionError("tables cannot be planned", [Problem(key, found, required, remedy)])
