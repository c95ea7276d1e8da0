"""Every code block of the documentation runs, and prints what the page says; `blocks.py` says how pages are marked."""

import pytest

from tests.docs.blocks import ROOT, PageError, blocks_of, indented_blocks, pages, programs_of
from tests.docs.run_page import check_output, missing_modules, parse, run_page

PAGES = {str(page.relative_to(ROOT)): page for page in pages()}
BLOCKS = {name: blocks_of(page) for name, page in PAGES.items()}
PROGRAMS = {name: programs_of(blocks) for name, blocks in BLOCKS.items()}
NOT_RUN = {block.where: block.not_run for blocks in BLOCKS.values() for block in blocks if block.not_run} | {
    program.first.where: f"needs {', '.join(missing)}, which launch/test_integrations.sh installs"
    for programs in PROGRAMS.values()
    for program in programs
    if (missing := missing_modules(program))
}


def _names_of_pages(in_full):
    """Of pages that have something to run: in full those whose other run leaves something out."""
    return [
        name
        for name, programs in PROGRAMS.items()
        if any(
            not missing_modules(program)
            and (not in_full or program.has("exhaustive") or program.first.language == "bash")
            and (in_full or not program.has("exhaustive"))
            for program in programs
        )
    ]


@pytest.mark.parametrize("name", _names_of_pages(in_full=False))
def test_the_blocks_of_a_page_run(name, tmp_path):
    run_page(PAGES[name], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", _names_of_pages(in_full=True))
def test_the_blocks_of_a_page_run_as_a_reader_runs_them(name, tmp_path):
    run_page(PAGES[name], tmp_path, in_full=True)


@pytest.mark.parametrize("where", [pytest.param(w, marks=pytest.mark.skip(reason=r)) for w, r in NOT_RUN.items()])
def test_a_block_is_not_run(where):
    """Never runs: the report of the tests lists each block that does not run, with its reason."""


@pytest.mark.parametrize("name", [name for name, blocks in BLOCKS.items() if blocks])
def test_blocks_of_data_can_be_parsed(name):
    for block in BLOCKS[name]:
        if block.language in ("json", "toml", "yaml"):
            parse(block)


def test_no_code_is_without_a_fence():
    assert [where for page in PAGES.values() for where in indented_blocks(page)] == []


PAGE = """Text.

<details markdown="1">
<summary>Setup</summary>

<!-- run: ranks=2 -->
```python
first = 1
print(first)
```

</details>

<!-- run: continued -->
```python
print(first + 1)
```
<!-- then
assert first == 1
-->

<!-- prints -->
```text
1
…
2
```

<!-- not run: wants a bucket
of yours -->
```bash
shardopt ls s3://bucket
```
"""


def test_how_a_page_is_read():
    blocks = blocks_of(ROOT / "page.md", PAGE)
    assert [block.line for block in blocks] == [8, 16, 24, 32]
    assert blocks[0].pieces == [(8, "first = 1\nprint(first)\n")]
    assert blocks[1].pieces == [(16, "print(first + 1)\n"), (19, "assert first == 1\n")]
    assert blocks[3].not_run == "wants a bucket of yours"
    (program,) = programs_of(blocks)
    assert program.first.ranks == 2 and program.blocks == (blocks[0], blocks[1]) and program.prints == (blocks[2],)


@pytest.mark.parametrize(
    "page",
    [
        "```python\n",
        "```pyhton\n1\n```\n",
        "```\n1\n```\n",
        "<!-- run: rank=2 -->\n```python\n1\n```\n",
        "<!-- not run: -->\n```python\n1\n```\n",
        "<!-- unknown -->\n```python\n1\n```\n",
        "<!-- run: continued -->\n```python\n1\n```\n",
        "<!-- prints -->\n```text\n1\n```\n",
        "Text.\n<!-- then\n1\n-->\n",
        "<!-- run: ranks=2\nhidden = 1\n-->\n```python\nhidden\n```\n",
        "```python\n1\n```\n<!-- then\nhidden = 1\n-->\n<!-- run: continued -->\n```python\nhidden\n```\n",
    ],
)
def test_a_page_that_cannot_be_read_is_refused(page):
    with pytest.raises(PageError):
        programs_of(blocks_of(ROOT / "page.md", page))


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("Text\n\n```python\n1 / 0\n```\n", "page.md:4 failed(.|\n)*line 4(.|\n)*ZeroDivisionError"),
        ("<!-- run: ranks=2 -->\n```python\nimport os\nassert os.environ['RANK'] == '0'\n```\n", "rank 1 raised"),
        ("<!-- run: fails -->\n```python\n1\n```\n", "should fail, and did not"),
        ("<!-- run: fails=KeyError -->\n```python\n1 / 0\n```\n", "failed without 'KeyError'"),
        ("```python\nprint(1)\nprint(2)\n```\n<!-- prints -->\n```text\n2\n1\n```\n", "was not printed"),
        ("```python\n1\n```\n<!-- then\nassert False\n-->\n", "line 5(.|\n)*AssertionError"),
        ("```bash\nfalse\ntrue\n```\n", "returned non-zero exit status 1"),
    ],
)
def test_a_block_that_does_not_do_what_the_page_says_is_seen(page, message, tmp_path, monkeypatch):
    path = tmp_path / "page.md"
    path.write_text(page)
    monkeypatch.setattr("tests.docs.blocks.ROOT", tmp_path)
    with pytest.raises(AssertionError, match=message):
        run_page(path, tmp_path)


def test_output_is_looked_for_in_order():
    (block,) = blocks_of(ROOT / "page.md", "<!-- prints -->\n```text\na … c\n…\nd\n```\n")
    check_output(block, "a b c\nx\nd\n")
    with pytest.raises(AssertionError, match="was not printed"):
        check_output(block, "d\na b c\n")


def test_lines_of_shell_run_on_ranks_of_the_tests(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- run: file=job.py -->\n```python\nimport os, sys\nimport torch.distributed as dist\n\n"
        "dist.init_process_group('gloo')\nprint(dist.get_world_size(), sys.argv[1], os.environ['A'])\n"
        "dist.barrier()\ndist.destroy_process_group()\n```\n"
        "```bash\nA=1 torchrun --standalone --nproc-per-node 2 \\\n    job.py x  # a comment\n```\n"
        "<!-- prints -->\n```text\n2 x 1\n```\n"
    )
    run_page(page, tmp_path)
