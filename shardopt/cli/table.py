"""All verbs of the command line, in the order of its help. To add one, add an entry here and a file in `verbs/`.

A verb that draws has its file in `plot/`. This file imports nothing that a verb runs, so help and completion start at
once.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Argument(NamedTuple):
    """The arguments of `argparse.ArgumentParser.add_argument`: names or flags, and options."""

    names: tuple[str, ...]
    options: dict[str, Any]


class Verb(NamedTuple):
    """A verb of the command line.

    Args:
        name: "show"; of a group of verbs two words, "plot run".
        help: one line.
        function: "module:function", imported when the verb is called; it takes an `Output` and the arguments by name,
            and returns the exit status.
        arguments: without `--json` and `--import`, which every verb has.
    """

    name: str
    help: str
    function: str
    arguments: tuple[Argument, ...]


def _arg(*names: str, help: str, **options: Any) -> Argument:
    return Argument(names, {"help": help, **options})


def _flag(name: str, help: str) -> Argument:
    return _arg(name, help=help, action="store_true")


JSON = _flag("--json", "print one JSON document instead of text")
IMPORT = _arg(
    "--import",
    help="import a module first, such as one that calls register_storage; may be given again",
    action="append",
    default=[],
    dest="modules",
    metavar="MODULE",
)

_URL = _arg("url", help="a checkpoint: a path, or anything that fsspec opens")
_SELECT = _arg(
    "--select", help="only keys in which this regular expression is found, after renaming", metavar="PATTERN"
)
_DROP_PER_RANK = _flag("--drop-per-rank", "leave out values that each rank has for itself")
_FILE = _arg("--out", "-o", help="the file to write: .png, .svg or .pdf", required=True, metavar="FILE")


def _rename(keys: str) -> Argument:
    text = f"rename {keys}: a regular expression and its replacement; may be given again"
    return _arg("--rename", help=text, action="append", metavar="PATTERN=INTO")


def _rules(keep_last: str) -> tuple[Argument, ...]:
    return (
        _arg("--keep-last", help=keep_last, type=int, metavar="N"),
        _arg("--keep-every", help="keep the first step at or after each multiple of this", type=int, metavar="STEPS"),
        _arg("--best", help="keep the N best by a metric, such as loss:min:2", metavar="METRIC:min|max:N"),
        _arg("--keep-seconds", help="keep what was saved less than so long ago", type=float, metavar="SECONDS"),
    )


VERBS = (
    Verb(
        "ls",
        "list the checkpoints of a run: when saved, ranks, bytes, metrics, condition, what rules keep",
        "shardopt.cli.verbs.ls:ls",
        (
            _arg("url", help="a run, one checkpoint, or this host's directory of a tier"),
            _flag("--verify", "read every byte and compare all checksums"),
            *_rules("show what rules would keep: the newest N, and what the next options name"),
        ),
    ),
    Verb(
        "follow",
        "print each step of a run or of published weights as it is committed, with bytes, ages and seconds",
        "shardopt.cli.verbs.follow:follow",
        (
            _arg("url", help="a run, or the root of a Publisher"),
            _arg("--count", help="end after so many steps", type=int, metavar="N"),
            _arg("--every", help="look so often", type=float, default=1.0, metavar="SECONDS"),
        ),
    ),
    Verb(
        "show",
        "show what a checkpoint holds: a tree, one tensor with statistics, or one value",
        "shardopt.cli.verbs.show:show",
        (
            _URL,
            _arg("key", help="a tensor, a value, or a module", nargs="?"),
            _arg("--glob", help="only keys that match, such as '*.weight'", metavar="PATTERN"),
            _arg("--regex", help="only keys in which this regular expression is found", metavar="PATTERN"),
            _arg("--depth", help="show N levels of the tree, with the sums of what is below", type=int, metavar="N"),
            _flag("--flat", "print one line for each key, without sums"),
            _flag("--all", "print every line, and each of repeated layers"),
            _flag("--boxes", "list the boxes of each tensor and their files"),
            _flag("--no-stats", "do not read the bytes of a tensor (needs no torch)"),
        ),
    ),
    Verb(
        "diff",
        "compare two checkpoints by checksums and values, across shardings; status 1 if they differ",
        "shardopt.cli.verbs.diff:diff",
        (
            _arg("a", help="a checkpoint", metavar="A"),
            _arg("b", help="the other one", metavar="B"),
            _rename("keys of A"),
            _SELECT,
            _flag("--all", "print every difference, and each of repeated layers"),
        ),
    ),
    Verb(
        "verify",
        "read every byte of checkpoints and compare all checksums",
        "shardopt.cli.verbs.verify:verify",
        (_arg("urls", help="paths, or anything that fsspec opens", nargs="+", metavar="URL"),),
    ),
    Verb(
        "reshard",
        "write a checkpoint as another number of ranks would have",
        "shardopt.cli.verbs.reshard:reshard",
        (
            _arg("src", help="a checkpoint"),
            _arg("dst", help="where to write"),
            _arg("--world-size", help="the number of ranks", type=int, required=True, metavar="N"),
            _DROP_PER_RANK,
        ),
    ),
    Verb(
        "convert",
        "convert a checkpoint to another format",
        "shardopt.cli.verbs.convert:convert",
        (
            _arg("src", help="a checkpoint of shardopt, torch.distributed.checkpoint, Hugging Face or torch.save"),
            _arg("dst", help="where to write"),
            _arg("--to", help="shardopt, dcp, huggingface or torch", required=True, metavar="FORMAT"),
            _rename("keys"),
            _SELECT,
            _arg(
                "--skip", help="leave out keys, as stored, in which this regular expression is found", metavar="PATTERN"
            ),
            _arg(
                "--dtype",
                help="of floating-point tensors outside of optimizers, such as bfloat16",
                metavar="DTYPE",
            ),
            _arg("--weights", help="write averages instead of the weights: their key, such as ema", metavar="KEY"),
            _arg(
                "--max-file-bytes",
                help="most bytes of tensors in a file; 5000000000 by default",
                type=int,
                metavar="BYTES",
            ),
            _arg(
                "--world-size", help="the number of ranks that share the tensors (shardopt only)", type=int, metavar="N"
            ),
            _DROP_PER_RANK,
            _flag("--check", "read what was written and compare the digest of each tensor"),
            _flag("--digests", "print the digest of each tensor"),
        ),
    ),
    Verb(
        "export-peft",
        "write the low-rank adapters of a checkpoint as a folder of PEFT's",
        "shardopt.cli.verbs.export_peft:export_peft",
        (
            _arg("src", help="a checkpoint"),
            _arg("dst", help="the folder to write"),
            _arg("--lora-alpha", help="the product of A and B is scaled by this / r", type=float, metavar="ALPHA"),
            _arg("--base-model", help="the folder, or the name on the hub, of the base model", metavar="NAME"),
            _arg("--config", help="a JSON file with other entries of adapter_config.json", metavar="FILE"),
            _arg("--model", help="the key of the model in the app that was saved; model where it is left out"),
            _arg("--adapter", help="the name of the adapter, where the model has several", metavar="NAME"),
        ),
    ),
    Verb(
        "prune",
        "list the checkpoints of a run that rules would not keep; --yes removes them",
        "shardopt.cli.verbs.prune:prune",
        (
            _arg("root", help="the root of a run"),
            *_rules("keep the newest N"),
            _flag("--verify", "read every byte first; damaged checkpoints do not count as kept"),
            _flag("--yes", "remove them; nothing is changed without this"),
        ),
    ),
    Verb(
        "fit",
        "estimate bytes, host memory and seconds of checkpoints like a stored one, and what a run would keep",
        "shardopt.cli.verbs.fit:fit",
        (
            _arg("url", help="a checkpoint, or the root of a run, of which the newest counts"),
            _arg("--ranks", help="of the run to be; as many as have saved it by default", type=int, metavar="N"),
            _arg("--steps", help="of the run to be, for what it keeps", type=int, metavar="N"),
            _arg("--every", help="save at steps that are multiples of this; 1 by default", type=int, metavar="STEPS"),
            *_rules("keep the newest N"),
            _arg("--seconds-per-step", help="of the run to be, for --keep-seconds", type=float, metavar="SECONDS"),
            _arg(
                "--measure",
                help="measure the storage about so long, 10 by default: writes files beside the checkpoint, and "
                "removes them; 0 measures nothing",
                type=float,
                metavar="SECONDS",
            ),
        ),
    ),
    Verb(
        "explain",
        "explain the code that an error ends with: its cause, and the way out; without a code, list all",
        "shardopt.cli.verbs.explain:explain",
        (_arg("code", help="such as does-not-fit", nargs="?"),),
    ),
    Verb(
        "env",
        "print what a bug report needs: versions, ranks; with a directory, whether all see it and its speed",
        "shardopt.cli.verbs.env:env",
        (
            _arg("url", help="a directory to test; files are written there and removed", nargs="?"),
            _arg("--mib", help="how much each rank writes; 64 by default", type=int, metavar="MIB"),
        ),
    ),
    Verb(
        "plan",
        "plan the cuts of embedding tables over ranks; needs no torch",
        "shardopt.cli.verbs.plan:plan",
        (
            _arg("file", help="a TOML or JSON file with `tables`, each with name, rows, dim, maybe dtype", nargs="?"),
            _arg(
                "--table",
                help="a table; may be given again",
                action="append",
                default=[],
                metavar="NAME:ROWS:DIM[:DTYPE]",
            ),
            _arg("--ranks", help="the number of ranks", type=int, required=True, metavar="N"),
            _arg("--memory", help="of each rank for tables, such as 80GB or 64GiB", required=True, metavar="SIZE"),
            _arg("--batch", help="samples of a rank in a step", type=float, required=True, metavar="SAMPLES"),
            _arg(
                "--pooling",
                help="ids per sample, for tables that the file gives none; 1 by default",
                type=float,
                default=1.0,
                metavar="IDS",
            ),
            _arg("--algorithm", help="of the optimizer, as `fuse` takes it", required=True, metavar="NAME"),
            _arg("--skew", help="exponent of Zipf's law for ids; 0, uniform, by default", type=float, default=0.0),
            _arg("--exchange-bandwidth", help="of a rank; 25GB in a second by default", metavar="SIZE"),
            _arg("--memory-bandwidth", help="of a rank; 2TB in a second by default", metavar="SIZE"),
        ),
    ),
    Verb(
        "report",
        "write a run and a checkpoint as one HTML file to look at: steps, tensors, layouts, changes",
        "shardopt.report.verb:report",
        (
            _arg(
                "urls",
                help="a run, or one checkpoint; then mirrors of the run, and roots of publishers",
                nargs="+",
                metavar="URL",
            ),
            _arg("--out", "-o", help="the file to write; with --json it may be left out", metavar="FILE"),
            _arg("--against", help="an earlier checkpoint: shows what has changed since", metavar="URL"),
            _flag("--values", "read every tensor: norms, histograms, NaN"),
            _arg(
                "--log", help="a log, for how long training waited; may be given again", action="append", metavar="FILE"
            ),
            *_rules("say what rules would keep: the newest N, and what the next options name"),
        ),
    ),
    Verb(
        "new",
        "write a program to copy: settings, training, resume, tests, a Slurm script; needs no torch",
        "shardopt.cli.verbs.new:new",
        (_arg("directory", help="a directory that is new or empty; its name becomes that of the run", metavar="DIR"),),
    ),
    Verb(
        "plot layout",
        "draw which rank holds what of the largest tensors, now and on a different number of ranks",
        "shardopt.cli.plot.plot_layout:plot_layout",
        (
            _URL,
            _arg("--world-size", help="the number of ranks to draw, beside those that saved", type=int, metavar="N"),
            _arg("--glob", help="only keys that match", metavar="PATTERN"),
            _FILE,
        ),
    ),
    Verb(
        "plot run",
        "draw a run by its steps: metrics, bytes of checkpoints, seconds of saves",
        "shardopt.cli.plot.plot_run:plot_run",
        (
            _arg("root", help="the root of a run"),
            _arg("--log", help="a log, for the seconds of saves; may be given again", action="append", metavar="FILE"),
            _FILE,
        ),
    ),
)
