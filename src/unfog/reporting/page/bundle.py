"""Join the page's modules, style and data into one HTML file that opens without a server. There is no other build."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent
_IMPORT = re.compile(r'^import (?:\{([^}]*)\} from )?"\./([\w./-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)
_EXPORT_LIST = re.compile(r"export\{([^}]*)\};?\s*$")  # how minified modules end
_TAG = re.compile(r'<link rel="stylesheet" href="static/([^"]+)">|<script type="module" src="static/main.js"></script>')
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)
_EMBEDDED = '<script type="application/json" id="embedded"></script>'
_TITLE = "<title>Unfog</title>"


def embed(data: Mapping[str, Any], title: str, refresh: int = 0) -> str:
    """Return the page as one file that holds this data; after `refresh` seconds it loads itself again, 0 for never."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    escaped = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    head = f'<meta http-equiv="refresh" content="{refresh}">\n' if refresh else ""
    shown = title.replace("&", "&amp;").replace("<", "&lt;")
    before, _, after = shell_html().partition(_EMBEDDED)
    before = before.replace(_TITLE, f"{head}<title>{shown} · Unfog</title>")
    return f"{before}{_EMBEDDED.replace('></', f'>{escaped}</')}{after}"


def _imports_of(text: str) -> list[str]:
    """Return the names of the modules that a module imports."""
    return [found[2] for found in _IMPORT.finditer(text)]


def _joined_script() -> str:
    """Return all modules that main.js needs as one script: each a function that returns its exports."""
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        if name not in parts:
            text = (PAGE / name).read_text(encoding="utf-8")
            for needed in _imports_of(text):
                add(needed)
            parts[name] = _as_function(name, text)

    add("main.js")
    # In strings, the only place where it occurs, an escaped slash is a slash; unescaped it would end the script.
    return ("const $modules = {};\n" + "".join(parts.values())).replace("</script", "<\\/script")


@cache
def shell_html() -> str:
    """Return the page as one file without data; `embed` puts data into it, as does the page's "Keep this view".

    Its policy names the hashes of its scripts and styles, so that nothing else in it can run: a name in the data that
    looks like markup stays text, and would not be executed if it did not.
    """
    hashes = {}

    def inline(found: re.Match[str]) -> str:
        style = found[1]
        kind, module = ("style", "") if style else ("script", ' type="module"')
        text = (PAGE / style).read_text(encoding="utf-8") if style else _joined_script()
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind] = f"'sha256-{digest}'"
        return f"<{kind}{module}>{text}</{kind}>"

    page = _TAG.sub(inline, (PAGE / "index.html").read_text(encoding="utf-8"))
    policy = _POLICY.format(scripts=hashes["script"], styles=hashes["style"])
    return page.replace(_TITLE, f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n{_TITLE}')


def _as_function(name: str, text: str) -> str:
    def read(found: re.Match[str]) -> str:
        names, module = found.groups()
        return f'const {{{names.replace(" as ", ": ")}}} = $modules["{module}"];\n' if names else ""

    exports = [found[2] for found in _EXPORT.finditer(text)]
    body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(read, text))
    if listed := _EXPORT_LIST.search(body):
        pairs = [pair.split(" as ") for pair in listed[1].split(",")]
        exports += [f"{pair[-1]}: {pair[0]}" for pair in pairs]
        body = body[: listed.start()]
    return f'$modules["{name}"] = (() => {{\n{body}\nreturn {{{", ".join(exports)}}};\n}})();\n'
