"""Code blocks of the documentation, and how each is run. `run_page.py` runs them; test_blocks.py is the test.

Every fenced block of README.md and docs/**/*.md is one of these, by the word after its fence:

    python              runs as a script of one process, from a new working directory that the page's blocks share
    bash                runs in that directory, line by line; a command that fails fails the block
    json, yaml, toml    is parsed
    text                is not run

A comment in the line above the fence, which no reader sees, says more:

    <!-- run: ranks=4 -->           on 4 ranks, as torchrun starts them: init_process_group("gloo") finds what it needs
    <!-- run: continued -->         continues where the python block above ended, with its names, in the same processes
    <!-- run: file=train.py -->     is not run but written to that file, for later blocks; with ranks=4 also run
    <!-- run: fails -->             must end with an error (of any kind), such as a rank that kills itself; with
    <!-- run: fails=CheckpointError -->   an error in whose text or output this occurs
    <!-- run: exhaustive -->        takes too long for every run of the tests: only with --exhaustive
    <!-- run: root -->              bash: in the repository's own folder
    <!-- run: s3=bucket,runs -->    with an S3 server that has these buckets, which s3:// then means; also gs= and az=
    <!-- run: needs=lightning,accelerate -->  is left out where a module is not there (launch/test_integrations.sh)
    <!-- run: warns -->             of other packages: their warnings are no errors here
    <!-- not run: wants a bucket of yours -->  with the reason, which the tests show. There should be few.

Words can be put together: `<!-- run: ranks=2 file=train.py -->`. Nothing else runs before a block or between blocks:
what a reader copies is what runs. Lines that would distract are folded, in a block that the next one continues:

    <details markdown="1">
    <summary>Setup: a model</summary>

    ```python
    import shardopt, torch
    model = torch.nn.Linear(4, 2)
    ```

    </details>

    <!-- run: continued -->
    ```python
    optimizer = shardopt.keyed("adamw", model.named_parameters())
    ```
    <!-- then
    assert len(optimizer.param_groups) == 1
    -->

The comment below the last block of a program has checks, which run when all of the page's own lines have. What comes
from outside is what a page names and no reader can copy: the buckets of `s3=`, `gs=` and `az=`, and the ranks.

A `text` block under `<!-- prints -->` is what the block before it has printed on rank 0: each of its lines must be in
the output, in this order, however it is spaced. `…` in a line stands for anything, alone for any lines.

In bash blocks `torchrun --standalone --nproc-per-node N FILE …`, `python FILE …` and `shardopt …`, also with lines of
`rm`, are run by the tests' own ranks, which have torch loaded; with --exhaustive the shell runs them as they stand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("python", "bash", "json", "yaml", "toml", "text")
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>.*)$")
STORES = ("s3", "gs", "az")
_WORDS = {"ranks", "continued", "file", "fails", "exhaustive", "root", "needs", "warns", *STORES}


class PageError(ValueError):
    """A page that the tests cannot read; says where."""


@dataclass(frozen=True)
class Block:
    """One fenced block. `checks`: what is tested when it has run, with the line at which that stands."""

    page: Path
    line: int  # of the first line of its text, counted from 1
    language: str
    text: str
    words: dict[str, str]
    checks: tuple[int, str] = (0, "")
    not_run: str = ""  # the reason
    prints: bool = False

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def ranks(self) -> int:
        return int(self.words.get("ranks", 1))

    @property
    def pieces(self) -> list[tuple[int, str]]:
        """(line, source) of the block and of its checks."""
        return [piece for piece in ((self.line, self.text), self.checks) if piece[1].strip()]


@dataclass(frozen=True)
class Program:
    """What runs as one script: a block, and the python blocks that continue it. `prints`: (line, text) to be seen."""

    blocks: tuple[Block, ...]
    prints: tuple[Block, ...] = ()

    @property
    def first(self) -> Block:
        return self.blocks[0]

    def has(self, word: str) -> bool:
        return any(word in block.words for block in self.blocks)


def pages() -> list[Path]:
    """All pages whose blocks are run."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """The fenced blocks of a page, in their order.

    Raises:
        PageError: a fence that is not closed, a language that is not known, or a comment that is not understood.
    """
    lines = (page.read_text() if text is None else text).splitlines()
    blocks: list[Block] = []
    comment: tuple[int, str] | None = None  # the last one, while no line but it has been seen since
    block_is_last = False
    number = 0
    while number < len(lines):
        line = lines[number]
        where = f"{page.name}:{number + 1}"
        if line.lstrip().startswith("<!--"):
            start = number
            while "-->" not in lines[number]:
                number += 1
                if number == len(lines):
                    raise PageError(f"{where}: a comment that does not end")
            body = "\n".join(lines[start : number + 1]).strip().removeprefix("<!--").removesuffix("-->")
            comment = (start + 1, body)
            if body.split() and body.split()[0] == "then":
                if not block_is_last:
                    raise PageError(f"{where}: `then` stands below a block")
                blocks[-1] = replace(blocks[-1], checks=(start + 2, body.partition("\n")[2]))
                comment = None
            number += 1
        elif match := _FENCE.match(line):
            start, indent = number + 1, len(match["indent"])
            number += 1
            while number < len(lines) and lines[number].strip() != match["fence"]:
                number += 1
            if number == len(lines):
                raise PageError(f"{where}: a block that does not end")
            body = "\n".join(each[indent:] for each in lines[start:number]) + "\n"
            blocks.append(_block(page, start + 1, match["info"].strip(), body, comment))
            comment, block_is_last = None, True
            number += 1
        else:
            if line.strip():
                comment, block_is_last = None, False
            number += 1
    return blocks


def programs_of(blocks: list[Block]) -> list[Program]:
    """Blocks as programs, without those that nothing runs."""
    programs: list[Program] = []
    for block in blocks:
        if block.prints:
            if not programs:
                raise PageError(f"{block.where}: nothing before it prints")
            last = programs.pop()
            programs.append(Program(last.blocks, (*last.prints, block)))
        elif "continued" in block.words:
            if not programs or programs[-1].first.language != "python" or block.language != "python":
                raise PageError(f"{block.where}: there is no python block that it continues")
            last = programs.pop()
            if last.blocks[-1].checks[1]:
                raise PageError(f"{block.where}: continues a block with `then`, which stands below the last one")
            programs.append(Program((*last.blocks, block), last.prints))
        elif block.language in ("python", "bash") and not block.not_run:
            programs.append(Program((block,)))
    return programs


def indented_blocks(page: Path, text: str | None = None) -> list[str]:
    """Where a page has code without a fence, by indentation, which nothing would run."""
    found, fence, comment, in_list, before = [], "", False, False, ""
    for number, line in enumerate((page.read_text() if text is None else text).splitlines(), 1):
        if match := _FENCE.match(line):
            if not fence:
                fence = match["fence"]
            elif line.strip() == fence:
                fence = ""
        elif not fence:
            comment = comment or line.lstrip().startswith("<!--")
            if not comment:
                if re.match(r" *([-*+]|\d+\.) |(!!!|\?\?\?|===)", line):
                    in_list = True
                elif line.strip() and not line.startswith(" "):
                    in_list = False
                if line.startswith("    ") and line.strip() and not before.strip() and not in_list:
                    found.append(f"{page.name}:{number}")
            comment = comment and "-->" not in line
        before = line
    return found


def _block(page: Path, line: int, info: str, text: str, comment: tuple[int, str] | None) -> Block:
    where = f"{page.name}:{line - 1}"
    if info.split(" ")[0] not in LANGUAGES:
        raise PageError(f"{where}: a block of {info!r}, where the tests know {', '.join(LANGUAGES)}")
    words: dict[str, str] = {}
    not_run, prints = "", False
    if comment is not None:
        head, _, hidden = comment[1].partition("\n")
        kind, _, rest = head.strip().partition(":")
        if kind == "run":
            words = {word: value for word, _, value in (each.partition("=") for each in rest.split())}
            if unknown := words.keys() - _WORDS:
                raise PageError(
                    f"{where}: {', '.join(sorted(unknown))}, where the tests know {', '.join(sorted(_WORDS))}"
                )
            if hidden.strip():
                raise PageError(f"{where}: lines that run and are not shown; a block that it continues can be folded")
        elif kind == "not run":
            if not rest.strip():
                raise PageError(f"{where}: not run for no reason")
            not_run = " ".join([rest.strip(), *hidden.split()])
        elif kind == "prints":
            prints = True
        else:
            raise PageError(f"{where}: the comment above it begins with none of `run:`, `not run:`, `prints`")
    return Block(page, line, info.split(" ")[0], text, words, not_run=not_run, prints=prints)
