"""The site builds without a warning, asks no other server for anything, and its reference has all that is public.

Usually it is built without what takes longest, docstrings and the index of the search; `--exhaustive` builds all of it.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys

import pytest

from shardopt.errors import ShardoptError
from tests.docs.blocks import ROOT
from tests.support.browser import browser, lacking, look
from tests.support.source import PACKAGE, sources

ENTRY = re.compile(r"^::: (\S+)", re.MULTILINE)
PACKAGES = [
    "shardopt",
    "shardopt.optim",
    "shardopt.checkpoint",
    "shardopt.checkpoint.dcp",
    "shardopt.checkpoint.rearrange",
    "shardopt.checkpoint.rearrange.families",
    "shardopt.data",
    "shardopt.nn",
    "shardopt.algorithms",
    "shardopt.sharding",
]


CONFIG = ROOT / "configs" / "mkdocs.yml"
HOOKS = ROOT / "docs" / "hooks.py"
WITHOUT_PLUGINS = f"{{INHERIT: {CONFIG}, docs_dir: {ROOT / 'docs'}, hooks: [{HOOKS}], plugins: []}}"


def build(folder, config):
    """Builds the site strictly, as launch/docs.sh does: a dead link or reference fails."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run([*command, "--site-dir", folder], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def whole_site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("whole-site"), CONFIG)


@pytest.fixture(scope="module")
def pages_alone(tmp_path_factory):
    config = tmp_path_factory.mktemp("config") / "mkdocs.yml"
    config.write_text(WITHOUT_PLUGINS)
    return build(tmp_path_factory.mktemp("pages"), config)


@pytest.fixture(params=["pages_alone", pytest.param("whole_site", marks=pytest.mark.exhaustive)])
def site(request):
    return request.getfixturevalue(request.param)


def test_nothing_is_fetched_from_elsewhere(site):
    """Links lead elsewhere; scripts, styles, fonts and pictures do not."""
    fetched = re.compile(
        r"<(?:script|img|iframe|source)[^>]*?src=\"?(\w+:)?//|<link(?![^>]*canonical)[^>]*href=\"?(\w+:)?//"
    )
    assert [str(page) for page in site.rglob("*.html") if fetched.search(page.read_text())] == []
    imported = re.compile(r"@import|url\(\"?(\w+:)?//")
    assert [str(style) for style in site.rglob("*.css") if imported.search(style.read_text())] == []


# The words that end one line and begin the next: letters on both sides of a break.
BROKEN_WORDS = """
const nodes = document.createTreeWalker(document.querySelector(".md-content"), NodeFilter.SHOW_TEXT);
const found = [], range = document.createRange();
for (let node; (node = nodes.nextNode()); ) {
  if (!node.parentElement.closest("code, h1, h2, h3, th") || node.parentElement.closest("pre")) continue;
  for (let i = 1, line; i < node.length; i++) {
    range.setStart(node, i - 1);
    range.setEnd(node, i);
    line = range.getClientRects()[0]?.bottom;
    range.setStart(node, i);
    range.setEnd(node, i + 1);
    if (line < range.getClientRects()[0]?.top + 1 && /[a-z][a-z]/.test(node.data.slice(i - 1, i + 1)))
      found.push(node.data.slice(0, i) + "|" + node.data.slice(i));
  }
}
return [found, document.documentElement.scrollWidth];
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
def test_no_name_breaks_inside_of_a_word_on_a_phone_and_no_page_scrolls_sideways(whole_site):
    pytest.importorskip("selenium", reason="selenium is not installed")
    wrong = {}
    with browser() as driver:
        for page in sorted({*whole_site.rglob("index.html")} - {*(whole_site / "source").rglob("index.html")}):
            look(driver, page, width=390)
            words, width = driver.execute_script(BROKEN_WORDS)
            if words or width > 390:
                wrong[str(page.parent.relative_to(whole_site))] = (words, width)
    assert wrong == {}


@pytest.mark.parametrize(
    ("html", "name"),
    [
        ("<code>shardopt.GradientClippingOptimizer</code>", "shardopt.|Gradient|Clipping|Optimizer"),
        ("<code>unit/optim/test_unstepped.py</code>", "unit/|optim/|test_|unstepped.py"),
        ('<code><a href="../optimizers/#shardopt.keyed">CombinedOptimizer</a></code>', "Combined|Optimizer"),
        ("<h1>From torch.distributed.checkpoint</h1>", "From torch.|distributed.|checkpoint"),
        ("<code>torch.compile</code>", "torch.compile"),
        (
            "<pre><span></span><code>optimizer.zero_grad(set_to_none=True)</code></pre>",
            "optimizer.zero_grad(set_to_none=True)",
        ),
        ("<p>torch.distributed.checkpoint</p>", "torch.distributed.checkpoint"),
    ],
)
def test_a_long_name_in_code_and_headings_may_break_between_its_words(html, name):
    specification = importlib.util.spec_from_file_location("hooks", HOOKS)
    hooks = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(hooks)
    assert hooks.on_page_content(html) == html.replace(name.replace("|", ""), name.replace("|", "<wbr>"))


@pytest.mark.exhaustive
def test_every_page_can_be_searched(whole_site):
    index = json.loads((whole_site / "search/search_index.json").read_text())
    found = {entry["location"].split("#")[0] for entry in index["docs"]}
    pages = {path.parent.relative_to(whole_site).as_posix() + "/" for path in whole_site.rglob("index.html")}
    assert {page for page in pages - found if page != "./" and not page.startswith("source/")} == set()
    assert not any(page.startswith("source/") for page in found)


def test_what_is_for_tests_is_not_on_the_site(site):
    assert [
        str(page) for page in site.rglob("*.html") if re.search(r"<!-- *(not )?run:|<!-- *then", page.read_text())
    ] == []


def test_the_reference_has_all_that_is_public():
    """By what a name stands for, as `shardopt` and `shardopt.optim` offer much of the same."""
    written = [name for page in (ROOT / "docs" / "reference").glob("*.md") for name in ENTRY.findall(page.read_text())]
    assert sorted({name for name in written if written.count(name) > 1}) == []
    of_integrations = {name for name in written if name.startswith("shardopt.integrations.")}
    there = {id(_imported(name)) for name in {*written} - of_integrations}
    public = {
        f"{package}.{name}": getattr(importlib.import_module(package), name)
        for package in PACKAGES
        for name in importlib.import_module(package).__all__
    }
    public |= {kind.__name__: kind for kind in _errors(ShardoptError)}
    # Aliases of types, which have no docstring, stand in the signatures that use them.
    missing = [name for name, value in public.items() if id(value) not in there and _has_docstring(value)]
    assert missing == []
    assert _public_integrations() - of_integrations == set()
    assert of_integrations - _public_integrations() == set()


def test_what_is_in_the_reference_has_a_docstring():
    written = {name for page in (ROOT / "docs" / "reference").glob("*.md") for name in ENTRY.findall(page.read_text())}
    modules = {f"shardopt.{source.module.replace('/', '.')}": source.tree for source in sources()}
    for name in written:
        if name.startswith("shardopt.integrations."):
            module, _, attribute = name.rpartition(".")
            (node,) = [node for node in modules[module].body if getattr(node, "name", "") == attribute]
            assert ast.get_docstring(node), name
        else:
            assert inspect.getdoc(_imported(name)), name


def _imported(name):
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return importlib.import_module(name)


def _errors(kind):
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == "shardopt.errors":
            yield from _errors(child)


def _has_docstring(value):
    return inspect.isclass(value) or inspect.isfunction(value)


# What a framework's file has for the others beside it.
BETWEEN_INTEGRATIONS = {"lightning_state", "optimizers", "run"}
HELPERS = {"Positioned", "batches_left", "sampler_of", "rest_of_epoch", "position_of"}


def _public_integrations():
    """The names that programs import, by their sources, as frameworks need not be installed."""
    names = set()
    for path in (PACKAGE / "integrations").glob("*.py"):
        if path.stem in BETWEEN_INTEGRATIONS | {"__init__"}:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                names.add(f"shardopt.integrations.{path.stem}.{node.name}")
    return {name for name in names if name.rpartition(".")[2] not in HELPERS}
