"""All verbs of the command line, in the order of its help. A new one is an entry here and a file beside."""

from __future__ import annotations

from shardopt.cli.parse.declared import Verb, argument, option, switch

_URL = argument("url", "a path, or anything that fsspec opens")
_RENAME = option(
    "rename", "a regular expression and what to put for it, in the keys of A", many=True, metavar="PATTERN=INTO"
)
_RULES = (
    option("keep_every", "those of steps that are multiples of this", kind=int, metavar="STEPS"),
    option("best", "those of the N best values of a metric", metavar="METRIC:min|max:N"),
)
_KEEP_LAST = "the rule to keep so many of the newest"

_FILE = option("out", "the file to write: .png, .svg or .pdf", required=True, metavar="FILE", short="-o")

VERBS = (
    Verb(
        "ls",
        "list the checkpoints of a run: when, ranks, bytes, metrics, which are whole, which are kept and why",
        "shardopt.cli.ls:ls",
        (
            argument("url", "the root of a run, one checkpoint, or this host's directory of a tier"),
            switch("verify", "read every byte of each, and compare all checksums"),
            option("keep_last", _KEEP_LAST + ", to see what the rules would keep", kind=int, metavar="N"),
            *_RULES,
        ),
    ),
    Verb(
        "show",
        "show what a checkpoint holds, as a tree; or one tensor of it with statistics, or one value",
        "shardopt.cli.show:show",
        (
            _URL,
            argument("key", "of a tensor or a value, or of all below a module", required=False),
            option("glob", "only keys that match, such as '*.weight'", metavar="PATTERN"),
            option("regex", "only keys in which it is found", metavar="PATTERN"),
            option("depth", "so many levels of the tree; what lies below is summed", kind=int, metavar="N"),
            switch("flat", "one line for each key, without sums"),
            switch("all", "every line, however many there are, and repeated layers one by one"),
            switch("boxes", "the boxes of each tensor, and the files that have them"),
            switch("no_stats", "of one tensor: do not read its bytes"),
        ),
    ),
    Verb(
        "diff",
        "compare two checkpoints, whatever ranks saved them, by checksums and values; status 1 if they differ",
        "shardopt.cli.diff:diff",
        (
            argument("a", "a checkpoint", metavar="A"),
            argument("b", "the other one", metavar="B"),
            _RENAME,
            option("select", "only keys in which this regular expression is found, after renaming", metavar="PATTERN"),
            switch("all", "every difference, however many there are"),
        ),
    ),
    Verb(
        "verify",
        "read all of one or more checkpoints and check every checksum",
        "shardopt.cli.verify:verify",
        (argument("urls", "paths, or anything that fsspec opens", many=True, metavar="URL"),),
    ),
    Verb(
        "reshard",
        "write a checkpoint as another number of ranks would have",
        "shardopt.cli.reshard:reshard",
        (
            argument("src", "a checkpoint"),
            argument("dst", "where the other one is to be"),
            option("world_size", "the number of ranks", kind=int, required=True, metavar="N"),
            switch("drop_per_rank", "leave out values that each rank has for itself"),
        ),
    ),
    Verb(
        "convert",
        "write a checkpoint, of whatever format, in another one",
        "shardopt.cli.convert:convert",
        (
            argument("src", "a checkpoint: ours, or of torch.distributed.checkpoint, Hugging Face, torch.save"),
            argument("dst", "where the other one is to be"),
            option("to", "shardopt, dcp, huggingface or torch", required=True, metavar="FORMAT"),
            option("rename", "a regular expression and what to put for it", many=True, metavar="PATTERN=INTO"),
            option("select", "only keys in which this regular expression is found, after renaming", metavar="PATTERN"),
            option("skip", "leave out keys in which this regular expression is found, as stored", metavar="PATTERN"),
            option("dtype", "of floating-point tensors outside of optimizers, such as bfloat16", metavar="DTYPE"),
            option("weights", "averages by their key, such as ema, in the place of the weights", metavar="KEY"),
            option("max_file_bytes", "of tensors in a file; 5e9 where it is left out", kind=int, metavar="BYTES"),
            option("world_size", "for shardopt: the number of ranks that share the tensors", kind=int, metavar="N"),
            switch("drop_per_rank", "leave out values that each rank has for itself"),
            switch("check", "read what was written, and compare the digest of each tensor"),
            switch("digests", "print the digest of each tensor"),
        ),
    ),
    Verb(
        "prune",
        "list the checkpoints of a run that rules would not keep, and with --yes remove them",
        "shardopt.cli.prune:prune",
        (
            argument("root", "the root of a run"),
            option("keep_last", "so many of the newest stay", kind=int, required=True, metavar="N"),
            *_RULES,
            switch("verify", "read every byte first: what is damaged takes nobody's place"),
            switch("yes", "remove them; without this nothing is changed"),
        ),
    ),
    Verb(
        "env",
        "print what a report of a fault needs: versions, ranks; of a directory, whether all see it, and its speed",
        "shardopt.cli.env:env",
        (
            argument("url", "a directory to try; files are written there and removed again", required=False),
            option("mib", "how much each rank writes; 64 where it is left out", kind=int, metavar="MIB"),
        ),
    ),
    Verb(
        "plot layout",
        "draw which rank holds what of the largest tensors, as stored, and on another number of ranks",
        "shardopt.cli.plot.plot_layout:plot_layout",
        (
            _URL,
            option("world_size", "the number of ranks afterwards", kind=int, metavar="N"),
            option("glob", "only keys that match", metavar="PATTERN"),
            _FILE,
        ),
    ),
    Verb(
        "plot run",
        "draw the metrics of a run over its steps, the bytes of its checkpoints, and the seconds of its saves",
        "shardopt.cli.plot.plot_run:plot_run",
        (
            argument("root", "the root of a run"),
            option("log", "a log of the run, which has the seconds and stalls of its saves", many=True, metavar="FILE"),
            _FILE,
        ),
    ),
)
