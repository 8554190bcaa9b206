"""The source of the package as syntax trees, for the tests that search it; each process parses it once."""

import ast
from functools import cache
from pathlib import Path

import unfog

ROOT = Path(unfog.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """Return the modules by their paths below the package, in order."""
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8")) for path in sorted(ROOT.rglob("*.py"))}
