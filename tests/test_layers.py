"""The law of layers: which part of Unfog may import which."""

import ast
from pathlib import Path

import unfog

ROOT = Path(unfog.__file__).parent
BASE = {"errors", "locks", "rows", "storage", "urls", "version"}
LEAVES = {"data", "diffusion", "models", "evaluation", "reporting"}
ALLOWED = {
    **{layer: {layer} for layer in LEAVES},
    "training": {"training", "diffusion"},
    "export": {"export", "models"},
    "config": {"config", "training"} | LEAVES,
    "diagnosis": {"diagnosis", "config", "training"} | LEAVES,
    "runs": {"runs", "diagnosis", "config", "training", "export"} | LEAVES,
    "cli": {"cli", "runs", "config", "training"} | LEAVES,
    "__init__": {"runs", "config", "reporting", "data"},
    "__main__": {"cli"},
    "errors": set(),
    "locks": set(),
    "rows": set(),
    "storage": set(),
    "urls": set(),
    "version": set(),
}


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module)
            if node.module == "unfog":
                found |= {f"unfog.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("unfog.")}


def test_no_layer_imports_what_it_may_not():
    modules = sorted(ROOT.rglob("*.py"))
    assert len(modules) > 30
    for path in modules:
        illegal = imports(path) - ALLOWED[layer(path)] - BASE
        assert not illegal, f"{path.relative_to(ROOT)} may not import {sorted(illegal)}"


def test_settings_import_no_torch():
    for path in [*ROOT.glob("*/settings.py"), *ROOT.glob("config/*.py"), ROOT / "cli/parsing.py"]:
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "torch" for name in names), path
