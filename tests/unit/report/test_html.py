"""The page of a report as text: what a hostile key can reach, what may run, how large it is."""

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser

import pytest
import torch

from shardopt import checkpoint
from shardopt.cli import main

pytest.importorskip("jinja2", reason="the extra `report` is not installed")
from shardopt.checkpoint.run.retention import Retention
from shardopt.report.gathering import report_document
from shardopt.report.html import SCRIPTS, page_of, script_text

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "\"' onclick=alert(1) x='",
    "{{ 7 * 7 }}",
    "\u2028]]>&lt;",
]


class Page(HTMLParser):
    """The elements of a page, and the text of its scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.raw, self.attributes = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *each) for each in attrs]

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("script", "style") and data.strip():
            self.raw.append((self.tags[-1], data))


def page_with(keys, tmp_path):
    checkpoint.save(tmp_path / "c", {key: torch.ones(2) for key in keys})
    document = report_document([str(tmp_path / "c")], None, False, [], Retention())
    return document, page_of(document)


def test_hostile_keys_add_no_element_and_come_back_as_they_are(tmp_path):
    _, plain = page_with(["w"], tmp_path / "plain")
    document, text = page_with(HOSTILE, tmp_path / "hostile")
    page = Page(text)
    assert page.tags == Page(plain).tags
    data = [raw for _, raw in page.raw if raw.startswith('{"version"')]
    assert json.loads(data[0]) == document and {each["key"] for each in document["checkpoint"]["tensors"]} == {*HOSTILE}


def test_hostile_findings_and_urls_are_text(tmp_path):
    document, _ = page_with(["w"], tmp_path)
    document |= {"url": HOSTILE[0], "findings": [{"kind": HOSTILE[1], "text": HOSTILE[2]}]}
    page = Page(page_of(document))
    assert page.tags.count("script") == 2 and "img" not in page.tags
    assert not [each for each in page.attributes if each[1].startswith("on")]


def test_a_path_of_bytes_that_are_no_text_is_escaped(tmp_path):
    path, page = tmp_path / "c\udcff", tmp_path / "report.html"
    checkpoint.save(path, {"w": torch.ones(2)})
    assert main(["report", str(path), "-o", str(page)]) == 0
    assert "c\\udcff" in page.read_text()


def test_the_policy_allows_the_script_and_the_style_of_the_page_and_nothing_else(tmp_path):
    _, text = page_with(["w"], tmp_path)
    page = Page(text)
    (policy,) = [value for _, name, value in page.attributes if name == "content" and "default-src" in value]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    style, _, script = (raw.encode() for _, raw in page.raw)
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(raw).digest()).decode()}'" for raw in (script, style)]
    assert [rules["default-src"], rules["script-src"], rules["style-src"]] == ["'none'", *hashes]
    assert {rules["base-uri"], rules["form-action"]} == {"'none'"}


def test_the_page_fetches_nothing(tmp_path):
    _, text = page_with(["w"], tmp_path)
    page = Page(text)
    assert not [each for each in page.attributes if each[1] in ("src", "srcset", "action")]
    assert {value for _, name, value in page.attributes if name == "href"} == {"#findings"}
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", script_text() + text.split("<body>")[0])


def test_each_name_of_the_script_is_in_one_module_only():
    names = re.findall(r"^(?:async )?(?:function|class|const|let) (\w+)", script_text(), re.MULTILINE)
    assert len(names) == len({*names}) > 20
    assert not re.search(r"^(import|export)\b|innerHTML|\beval\b|insertAdjacentHTML", script_text(), re.MULTILINE)


def test_all_modules_are_in_the_script():
    from importlib import resources

    there = {path.name for path in (resources.files("shardopt.report") / "page").iterdir()}
    assert there == {*SCRIPTS, "report.html", "report.css"}


def test_a_thousand_steps_and_ten_thousand_tensors_fit_in_three_megabytes(tmp_path):
    step = {
        **{"branch": 0, "in_run": True, "to_be_removed": False, "save_id": "0123456789ab", "saved_at": 1e9 + 0.123456},
        **{"seconds": 1.234567, "world_size": 512, "tensors": 10000, "nbytes": 10**12, "nbytes_beside": 0},
        **{"metrics": {"loss": 2.345678901234567}, "kept": None, "why": [], "links": [], "stall_seconds": 0.01},
        **{"left": None, "places": [{"place": 0, "condition": "committed", "problems": []}], "complete": True},
    }
    state = {f"model.layers.{i}.part_{j}.weight": torch.ones(1) for i in range(100) for j in range(100)}
    checkpoint.save(tmp_path / "c", state)
    document = report_document([str(tmp_path / "c")], None, False, [], Retention())
    run = {"kind": "run", "url": "r", "branch": 0, "branches": [], "places": [{"url": "r", "kind": "root"}]}
    run |= {"problem": None, "metrics": ["loss"], "removed": [], "steps": [{"step": i, **step} for i in range(1000)]}
    assert len(page_of({**document, "runs": [run]}).encode()) < 3e6


def test_without_jinja2_the_error_is_how_to_install_it_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    checkpoint.save(tmp_path / "c", {"w": torch.ones(2)})
    monkeypatch.delitem(sys.modules, "shardopt.report.html")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["report", str(tmp_path / "c"), "-o", str(tmp_path / "x.html")]) == 1
    assert "pip install 'shardopt[report]'" in capsys.readouterr().err and not (tmp_path / "x.html").exists()
    assert main(["report", str(tmp_path / "c"), "--json"]) == 0
