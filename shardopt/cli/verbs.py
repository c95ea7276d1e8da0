"""All verbs of the command line, in the order of its help. A new one is an entry here and a file beside.

Nothing here imports what a verb runs, so that help and completion are there at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Argument(NamedTuple):
    """What `argparse.ArgumentParser.add_argument` takes: names or flags, and options."""

    names: tuple[str, ...]
    options: dict[str, Any]


class Verb(NamedTuple):
    """A verb of the command line.

    Args:
        name: "show"; of a group of verbs two words, "plot run".
        help: one line.
        function: "module:function", imported when the verb is called; it takes an `Output` and the arguments by name,
            and returns the exit status.
        arguments: without `--json`, which every verb has.
    """

    name: str
    help: str
    function: str
    arguments: tuple[Argument, ...]


def _arg(*names: str, help: str, **options: Any) -> Argument:
    return Argument(names, {"help": help, **options})


def _flag(name: str, help: str) -> Argument:
    return _arg(name, help=help, action="store_true")


JSON = _flag("--json", "print one JSON document in the place of text")

_URL = _arg("url", help="a path, or anything that fsspec opens")
_SELECT = _arg(
    "--select", help="only keys in which this regular expression is found, after renaming", metavar="PATTERN"
)
_DROP_PER_RANK = _flag("--drop-per-rank", "leave out values that each rank has for itself")
_FILE = _arg("--out", "-o", help="the file to write: .png, .svg or .pdf", required=True, metavar="FILE")


def _rename(of: str) -> Argument:
    text = "a regular expression and what to put for it" + of
    return _arg("--rename", help=text, action="append", metavar="PATTERN=INTO")


def _rules(keep_last: str, required: bool) -> tuple[Argument, ...]:
    return (
        _arg("--keep-last", help=keep_last, type=int, required=required, metavar="N"),
        _arg("--keep-every", help="those of steps that are multiples of this", type=int, metavar="STEPS"),
        _arg("--best", help="those of the N best values of a metric", metavar="METRIC:min|max:N"),
    )


VERBS = (
    Verb(
        "ls",
        "list the checkpoints of a run: when, ranks, bytes, metrics, which are whole, which are kept and why",
        "shardopt.cli.ls:ls",
        (
            _arg("url", help="the root of a run, one checkpoint, or this host's directory of a tier"),
            _flag("--verify", "read every byte of each, and compare all checksums"),
            *_rules("the rule to keep so many of the newest, to see what the rules would keep", required=False),
        ),
    ),
    Verb(
        "show",
        "show what a checkpoint holds, as a tree; or one tensor of it with statistics, or one value",
        "shardopt.cli.show:show",
        (
            _URL,
            _arg("key", help="of a tensor or a value, or of all below a module", nargs="?"),
            _arg("--glob", help="only keys that match, such as '*.weight'", metavar="PATTERN"),
            _arg("--regex", help="only keys in which it is found", metavar="PATTERN"),
            _arg("--depth", help="so many levels of the tree; what lies below is summed", type=int, metavar="N"),
            _flag("--flat", "one line for each key, without sums"),
            _flag("--all", "every line, however many there are, and repeated layers one by one"),
            _flag("--boxes", "the boxes of each tensor, and the files that have them"),
            _flag("--no-stats", "of one tensor: do not read its bytes"),
        ),
    ),
    Verb(
        "diff",
        "compare two checkpoints, whatever ranks saved them, by checksums and values; status 1 if they differ",
        "shardopt.cli.diff:diff",
        (
            _arg("a", help="a checkpoint", metavar="A"),
            _arg("b", help="the other one", metavar="B"),
            _rename(", in the keys of A"),
            _SELECT,
            _flag("--all", "every difference, however many there are"),
        ),
    ),
    Verb(
        "verify",
        "read all of one or more checkpoints and check every checksum",
        "shardopt.cli.verify:verify",
        (_arg("urls", help="paths, or anything that fsspec opens", nargs="+", metavar="URL"),),
    ),
    Verb(
        "reshard",
        "write a checkpoint as another number of ranks would have",
        "shardopt.cli.reshard:reshard",
        (
            _arg("src", help="a checkpoint"),
            _arg("dst", help="where the other one is to be"),
            _arg("--world-size", help="the number of ranks", type=int, required=True, metavar="N"),
            _DROP_PER_RANK,
        ),
    ),
    Verb(
        "convert",
        "write a checkpoint, of whatever format, in another one",
        "shardopt.cli.convert:convert",
        (
            _arg("src", help="a checkpoint: ours, or of torch.distributed.checkpoint, Hugging Face, torch.save"),
            _arg("dst", help="where the other one is to be"),
            _arg("--to", help="shardopt, dcp, huggingface or torch", required=True, metavar="FORMAT"),
            _rename(""),
            _SELECT,
            _arg(
                "--skip", help="leave out keys, as stored, in which this regular expression is found", metavar="PATTERN"
            ),
            _arg("--dtype", help="of floating-point tensors outside of optimizers, such as bfloat16", metavar="DTYPE"),
            _arg("--weights", help="averages by their key, such as ema, in the place of the weights", metavar="KEY"),
            _arg("--max-file-bytes", help="of tensors in a file; 5e9 where it is left out", type=int, metavar="BYTES"),
            _arg(
                "--world-size", help="for shardopt: the number of ranks that share the tensors", type=int, metavar="N"
            ),
            _DROP_PER_RANK,
            _flag("--check", "read what was written, and compare the digest of each tensor"),
            _flag("--digests", "print the digest of each tensor"),
        ),
    ),
    Verb(
        "export-peft",
        "write the low-rank adapters of a checkpoint as a folder of PEFT's",
        "shardopt.cli.export_peft:export_peft",
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
        "list the checkpoints of a run that rules would not keep, and with --yes remove them",
        "shardopt.cli.prune:prune",
        (
            _arg("root", help="the root of a run"),
            *_rules("so many of the newest stay", required=True),
            _flag("--verify", "read every byte first: what is damaged takes nobody's place"),
            _flag("--yes", "remove them; without this nothing is changed"),
        ),
    ),
    Verb(
        "explain",
        "explain the code that an error ends with: its cause, and the way out; without a code, list all",
        "shardopt.cli.explain:explain",
        (_arg("code", help="such as does-not-fit", nargs="?"),),
    ),
    Verb(
        "env",
        "print what a report of a fault needs: versions, ranks; of a directory, whether all see it, and its speed",
        "shardopt.cli.env:env",
        (
            _arg("url", help="a directory to try; files are written there and removed again", nargs="?"),
            _arg("--mib", help="how much each rank writes; 64 where it is left out", type=int, metavar="MIB"),
        ),
    ),
    Verb(
        "plot layout",
        "draw which rank holds what of the largest tensors, as stored, and on another number of ranks",
        "shardopt.cli.plot.plot_layout:plot_layout",
        (
            _URL,
            _arg("--world-size", help="the number of ranks afterwards", type=int, metavar="N"),
            _arg("--glob", help="only keys that match", metavar="PATTERN"),
            _FILE,
        ),
    ),
    Verb(
        "plot run",
        "draw the metrics of a run over its steps, the bytes of its checkpoints, and the seconds of its saves",
        "shardopt.cli.plot.plot_run:plot_run",
        (
            _arg("root", help="the root of a run"),
            _arg("--log", help="a log, for the seconds and stalls of its saves", action="append", metavar="FILE"),
            _FILE,
        ),
    ),
)
