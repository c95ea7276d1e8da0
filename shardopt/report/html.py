"""Makes the page of a report: one HTML file that fetches nothing, and runs only its own script.

The document is JSON in a script of another type, which browsers do not run, with `<` escaped. A Content-Security-Policy
allows the one script and the one style sheet of the page by their hashes: text of a checkpoint runs nothing, even if it
came into the page unescaped.

The script is written as ES modules in `page/`. A page that is opened from disk cannot import files, so they are joined
into one module here, without their imports and exports; each top-level name is in one of them only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from shardopt.errors import Problem, ShardoptError
from shardopt.world import utc_text

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from jinja2.utils import htmlsafe_json_dumps
    from markupsafe import Markup
except ModuleNotFoundError:
    _missing = Problem("jinja2", "no such package", "jinja2 3.1 or newer", "pip install 'shardopt[report]'")
    raise ShardoptError("jinja2 is not installed", [_missing], code="missing-package") from None

SCRIPTS = (
    *("format.js", "dom.js", "grid.js", "boxes.js", "histogram.js", "details.js"),
    *("timeline.js", "steps.js", "tensors.js", "heat.js", "main.js"),
)
"""The modules of the script; each imports only from earlier ones."""

_IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def page_of(document: Mapping[str, Any]) -> str:
    """Returns the page of a document of `report_document`, as HTML. Pure."""
    script, style = script_text(), _text_of("report.css")
    policy = f"default-src 'none'; script-src '{_hash_of(script)}'; style-src '{_hash_of(style)}'"
    environment = Environment(
        loader=PackageLoader("shardopt.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["utc"] = utc_text
    return environment.get_template("report.html").render(
        document=document,
        data=htmlsafe_json_dumps(document, dumps=lambda wire: json.dumps(wire, separators=(",", ":"), allow_nan=False)),
        policy=f"{policy}; base-uri 'none'; form-action 'none'",
        script=Markup(script),  # of this package, as the style is: no text of a checkpoint
        style=Markup(style),
    )


def script_text() -> str:
    """Returns the joined modules, between line breaks."""
    parts = (_EXPORT.sub("", _IMPORT.sub("", _text_of(name))) for name in SCRIPTS)
    return "\n" + "\n".join(parts)


def _text_of(name: str) -> str:
    return (resources.files("shardopt.report") / "page" / name).read_text(encoding="utf-8")


def _hash_of(text: str) -> str:
    """Returns the source expression of a Content-Security-Policy for an inline text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
