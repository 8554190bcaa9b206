"""Plain source: the modules of a network as one Python file that needs torch and nothing of this package."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_HEAD = '''"""{title}

Plain torch, written by Unfog: this file needs no package but torch. `build` makes the network.
"""

from __future__ import annotations

{imports}

RequestError = ValueError
'''


def plain_source(title: str, names: Iterable[str], left_out: Iterable[str] = ()) -> str:
    """Return the source of modules of this package as one file that imports no module of it.

    Args:
        title: the first line of the file's docstring.
        names: full names of the modules, each after those that it uses.
        left_out: classes and functions that the file does without.
    """
    imports: dict[str, None] = {}
    bodies = [_body(import_module(name), imports, frozenset(left_out)) for name in names]
    head = _HEAD.format(title=title, imports="\n".join(sorted(imports, key=lambda line: (line.startswith("f"), line))))
    return head + "".join(bodies)


def _body(module: ModuleType, imports: dict[str, None], left_out: frozenset[str]) -> str:
    """Return a module without docstring and imports; those of other packages are added to `imports`."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    for number, node in enumerate(ast.parse(source).body):
        imported = isinstance(node, ast.Import | ast.ImportFrom)
        if imported and not ast.unparse(node).startswith(("from unfog", "import unfog", "from __future__")):
            imports[ast.unparse(node)] = None
        docstring = number == 0 and isinstance(node, ast.Expr)
        if imported or docstring or getattr(node, "name", "") in left_out:
            assert node.end_lineno is not None
            # Blank lines in their place, as the numbers of lines from the syntax tree must stay right.
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    # The functions of `layers` are in the same file.
    text = re.sub(r"\blayers\.(?=attention\()", "", "\n".join(lines))
    # torch's own norm gives the same numbers; ours keeps a memory format on CUDA, for the speed of training.
    text = re.sub(r"(?<![\w.])GroupNorm\b", "nn.GroupNorm", text)
    return "\n\n" + re.sub(r"\n{4,}", "\n\n\n", text.strip() + "\n")


def package_file(name: str) -> bytes:
    """Return the file of a module of this package, which is not imported: it may need a package that is missing."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_bytes()
