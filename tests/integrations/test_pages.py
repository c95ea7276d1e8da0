"""What the pages say of their programs: how many of the lines are shardopt's, counted."""

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "integrations"
PAGES = [page for page in sorted(FOLDER.glob("*.md")) if page.stem != "index"]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def lines_of_shardopt(program):
    """The lines that use a name imported from shardopt, or one assigned from its call; but for what a loop is over."""
    tree = ast.parse(program)
    names, found = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            if module.split(".")[0] == "shardopt":
                names |= {alias.asname or alias.name for alias in node.names}
                found.add(node.lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            called = node.value.func
            root = called.value if isinstance(called, ast.Attribute) else called
            if isinstance(root, ast.Name) and root.id in names:
                names.add(node.targets[0].id)
    over = {id(node.iter) for node in ast.walk(tree) if isinstance(node, ast.For)}  # a program without it has that line
    found |= {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id in names and id(node) not in over
    }
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_newcomer_writes_ten_lines_at_most_as_many_as_the_page_says(page):
    text = page.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    program = next(block for block in blocks if "shardopt" in block)  # what it continues is the user's own
    lines = lines_of_shardopt(program)
    said = re.search(r"(\w+) lines are\s+shardopt's", text)
    assert said, f"{len(lines)} lines are shardopt's: {sorted(lines)}"
    assert NUMBERS.index(said.group(1).lower()) == len(lines) <= 10, sorted(lines)


def test_the_count():
    program = "import shardopt as s\nfrom torch import x\no = s.keyed(x)\nx.step()\nfor b in o:\n    y(b)\nz = x(o)\n"
    assert lines_of_shardopt(program) == {1, 3, 7}
