"""The law of layers: which folder of Unfog may import which, and that no modules import each other in a ring."""

import ast
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from package_source import ROOT, trees

_spec = importlib.util.spec_from_file_location("layout_figures", ROOT.parents[1] / "scripts" / "layout_figures.py")
figures = sys.modules["layout_figures"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(figures)
BASE = {
    "_version",
    "custom",
    "device",
    "errors",
    "files",
    "callbacks",
    "text",
    "settings",
    "values",
}
LEAVES = {"data", "diffusion", "models", "evaluation", "reporting"}
# Each of these may import those before it, and all leaves, training and export.
STOREYS = ("config", "process", "pipeline", "planning", "inference", "checks", "runs", "commands", "cli", "serve")
BELOW = LEAVES | {"training", "export"}
ALLOWED = {
    **{leaf: {leaf} for leaf in LEAVES},
    **{module: set() for module in BASE},
    "training": {"training", "diffusion"},
    "export": {"export", "models"},
    **{storey: BELOW | set(STOREYS[: i + 1]) for i, storey in enumerate(STOREYS)},
    # Commands parse, call and print: the rest is the business of the layers below.
    "commands": {"commands", "config", "data", "inference", "pipeline", "planning", "process", "reporting", "runs"},
    "__init__": BELOW | set(STOREYS) - {"cli", "serve"} | {"from_python"},
    "from_python": BELOW | set(STOREYS) - {"cli", "serve"},
    "__main__": {"cli"},
}
# Folders inside a layer: which of the layer's other folders each may import ("" is the layer's own modules).
SUBFOLDERS = {
    "data.buckets": {"", "columns", "sources"},
    "data.sources": {""},
    "data.containers": {"", "sources"},
    "data.columns": {"", "full_depth", "sources"},
    "data.full_depth": {"", "sources"},
    "data.scans": {"", "sources"},
    "data.webdataset": {"", "sources"},
    "data.packs": {"", "sources"},
    "training.stability": {""},
    "training.checkpoints": {""},
    "training.distributed": {"", "checkpoints", "stability"},
    "training.updates": {"", "distributed", "stability"},
    "checks.images": {""},
    "checks.settings": {""},
    "models.foreign": {""},
    "models.pretrained": set(),
    "inference.exports": {""},
    "runs.weights": set(),
    "values.kinds": {""},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def graph() -> dict[str, set[str]]:
    """Modules that each module imports, inside functions and under TYPE_CHECKING too, without "unfog."."""
    arrows, known = {}, {f"unfog.{name}" for name in modules()}
    for name, path in modules().items():
        found = figures.imported(trees()[str(path.relative_to(ROOT))], known)
        arrows[name] = {one.removeprefix("unfog.") for one in found}
    return arrows


def test_no_layer_imports_one_above_it():
    arrows = graph()
    assert len(arrows) > 100
    for name, targets in arrows.items():
        layer = name.split(".")[0]
        illegal = {t.split(".")[0] for t in targets} - ALLOWED[layer] - BASE
        assert not illegal, f"{name} may not import {sorted(illegal)}"


def test_folders_inside_a_layer_keep_their_law():
    arrows, known = graph(), modules()
    for folder, allowed in SUBFOLDERS.items():
        layer = folder.split(".")[0]
        for name in (n for n in arrows if n.startswith(f"{folder}.")):
            for target in (t for t in arrows[name] if t.split(".")[0] == layer and t in known):
                inside = ".".join(target.split(".")[1:-1])
                assert target.startswith(f"{folder}.") or inside in allowed, f"{name} may not import {target}"


def test_no_modules_import_each_other():
    assert figures.rings(graph()) == []


def test_no_folder_has_more_than_15_modules():
    for folder in {path.parent for path in modules().values()}:
        assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 15, folder


def test_no_module_has_more_than_500_lines():
    for path in modules().values():
        assert len(path.read_text().splitlines()) <= figures.LONG_MODULE, path


def _imports(nodes: Sequence[ast.AST]) -> set[str]:
    """Packages that these statements import."""
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def test_commands_are_thin():
    for place in ROOT.glob("commands/*.py"):
        # That of `init`, which asks its questions, has the most.
        assert len(place.read_text().splitlines()) <= 110, f"{place.name} holds more than a command"


def test_settings_import_no_torch():
    for place, tree in trees().items():
        if Path(place).name == "settings.py" or place.startswith("config/") or place == "cli/parse.py":
            assert "torch" not in _imports(tree.body), place


def test_commands_import_no_torch_not_even_in_a_function():
    for place, tree in trees().items():
        if place.startswith("commands/"):
            assert "torch" not in _imports([*ast.walk(tree)]), place


def test_modules_ask_the_representation_the_task_and_the_conditions():
    texts = {f"unfog.{name}": path.read_text("utf-8") for name, path in modules().items()}
    latents, autoencoder, values = (
        [place for name, text in texts.items() for place in figures.asked(name, text, word)]
        for word in (figures.LATENTS, figures.AUTOENCODER, figures.BYTES)
    )
    assert len(latents) <= 2, latents
    assert len(autoencoder) <= 2, autoencoder
    assert not values
    labels = [name for name, text in texts.items() if figures.LABEL.search(text)]
    assert len(labels) <= 40, labels
    assert sum(len(figures.loops_of_losses(tree)) for tree in trees().values()) == 1
