"""What the site has from outside of docs/, and how links lead there. MkDocs calls the `on_…` functions.

Pages link as they do on a code host, by paths in the repository: `[the table](../benchmarks/results/step.md)`. Of these

- README.md is the site's first page, CHANGELOG.md, CONTRIBUTING.md, SECURITY.md and benchmarks/results/ are pages of
  it, none of them copied;
- any other file that is linked to becomes a page with its source.

A link to what is not there is left as it is, which a strict build refuses.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
_LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCED = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2\s*$", re.DOTALL | re.MULTILINE)
_NAMES = re.compile(r"<pre\b.*?</pre>|<(code|th|h[1-4])\b.*?</\1>", re.DOTALL)
_LONG = re.compile(r"\S{14,}")  # shorter ones stay in one piece
_WORDS = re.compile(r"(?<=[\w/.:][._/(])(?=[\w\"'&])(?!\d|\w{1,3}(?!\w))|(?<=[a-z0-9])(?=[A-Z][a-z])")
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and pictures that lie outside of docs/, and those files that pages link to."""
    taken = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
    taken |= {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
    for path in sorted((ROOT / "benchmarks" / "results").iterdir()):
        name = "index.md" if path.name == "README.md" else path.name
        taken[f"benchmarks/results/{path.name}"] = f"measured/{name}"
    for source, uri in taken.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    known = {*_uris(files)}
    for file in [*files.documentation_pages()]:
        for target in _LINK.findall(_without_blocks(file.content_string)):
            path = _in_repository(file, target[1])
            if path not in known and (ROOT / path).is_file():
                known.add(path)
                files.append(File.generated(config, f"source/{path}.md", content=_source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Makes links of the repository those of the site, and leaves out comments, which are for the tests."""
    uris = _uris(files)

    def link(match: re.Match[str]) -> str:
        path = _in_repository(page.file, match[2])
        of_folder = (uris.get(posixpath.join(path, name)) for name in ("index.md", "README.md"))
        uri = uris.get(path) or next(filter(None, of_folder), None)
        if uri is None:
            return match[0]
        return match[1] + posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".") + match[3]

    return _outside_of_blocks(markdown, lambda text: _LINK.sub(link, _COMMENT.sub("", text)))


def on_page_content(html: str, **_: Any) -> str:
    """Lets a browser break long names in code and headings between their words, so that they fit a phone."""

    def divided(text: re.Match[str]) -> str:
        return _LONG.sub(lambda name: _WORDS.sub("<wbr>", name[0]), text[0])

    # Blocks of code scroll: they stay as they are.
    return _NAMES.sub(lambda match: re.sub(r"(?<=>)[^<]+", divided, match[0]) if match[1] else match[0], html)


def _uris(files: Files) -> dict[str, str]:
    """The path in the repository of everything in the site: its path there."""
    uris = {}
    for file in files:
        if file.src_uri.startswith("source/"):
            uris[file.src_uri.removeprefix("source/").removesuffix(".md")] = file.src_uri
        elif _path_of(file) and not file.inclusion.is_excluded():
            uris[_path_of(file)] = file.src_uri
    return uris


def _path_of(file: File) -> str:
    """The path in the repository; empty for what comes from elsewhere, as the theme's files and pages that are made."""
    path, root = file.abs_src_path or "", f"{ROOT}/"  # not as paths: a build asks this some ten thousand times
    return path.removeprefix(root) if path.startswith(root) else ""


def _in_repository(file: File, target: str) -> str:
    """Where a page's link leads, as a path in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_path_of(file)), target))


def _source_page(path: str) -> str:
    text = (ROOT / path).read_text()
    fence = "`" * (1 + max([2, *(len(run) for run in re.findall(r"`{3,}", text))]))
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _without_blocks(markdown: str) -> str:
    return _FENCED.sub("", markdown)


def _outside_of_blocks(markdown: str, change: Callable[[str], str]) -> str:
    """Applies `change` to all but fenced blocks."""
    parts, position = [], 0
    for match in _FENCED.finditer(markdown):
        parts += [change(markdown[position : match.start()]), match[0]]
        position = match.end()
    return "".join([*parts, change(markdown[position:])])
