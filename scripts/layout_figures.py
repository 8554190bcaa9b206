"""Print how easily this code is read, in figures, beside those of an earlier commit (`--base COMMIT`).

All figures come from the syntax trees and texts alone, but for the way of a setting, which is followed through a real
start.
`--show` lists the places behind the figures of this checkout instead.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = "2941532"
RIDDLES = {"What", "Whether", "Who", "Whoever", "How", "Which", "Where", "As", "Of"}
BRIEF = 5  # words; so short a docstring repeats the name
WIDE = 6  # parameters
LONG = 40  # lines of a function
LONG_MODULE = 500
LABEL = re.compile(r"\blabel\b")
LABELS = re.compile(r"(?<![a-z])labels?(?![a-z])", re.IGNORECASE)  # as a part of a name too: label_dropout
# Places that know of images what `values.image_format` should know alone.
BYTES = re.compile(r"127\.5|np\.(?:empty|zeros|full)\(\(.*\b(?:size|side|height)\b.*\bchannels\b")
IF = r"\b(?:if|elif|and|or|not|while) (?:not )?[\w.]*\b"
LATENTS = re.compile(rf"\buses_latents\b|isinstance\([^)]*\bLatentSpace\b|{IF}(?:autoencoder_folder|config\.codec)\b")
AUTOENCODER = re.compile(rf"\btrains_autoencoder\b|isinstance\([^)]*\bAutoencoderTask\b|{IF}autoencoder\.factor\b")
Loop = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
# What somebody reads to understand a training step: before, and now.
LOOP = (
    (
        *("training/loop.py", "training/protocols.py", "training/passes.py", "training/memory.py", "training/state.py"),
        *("training/together.py", "training/distributed.py", "training/guard.py", "training/precision.py", "rows.py"),
    ),
    (
        *("training/loop.py", "training/gradient.py", "training/hooks.py", "training/state.py"),
        *("training/updates/updater.py",),
    ),
)
LR = 0.00123
# Modules that only check, record, digest or print the setting, here and in the commit before: a call below one of them
# is a branch off the way to the optimizer, and not part of it.
ASIDE = (
    *("unfog.reporting", "unfog.callbacks", "unfog.urls", "unfog.checks", "unfog.diagnosis", "unfog.settings"),
    *("unfog.config.resume_rules", "unfog.runs.changes", "unfog.process.run_folder", "unfog.runs.folder"),
)
# Trains one step and prints the modules on the call stack whenever the value of --lr, or the settings that hold it, are
# an argument of a call.
TRACER = f"""
import sys
modules = set()
def carries(value):
    kind = type(value).__name__
    return (kind, value) in (("float", {LR}), ("str", "{LR}")) or kind == "Optimizer" and value.lr == {LR}
def profile(frame, event, _):
    code = frame.f_code
    if event != "call" or not frame.f_globals.get("__name__", "").startswith("unfog."):
        return
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if any(carries(frame.f_locals.get(name)) for name in names):
        stack = set()
        while frame:
            stack.add(frame.f_globals.get("__name__", ""))
            frame = frame.f_back
        if not any(name.startswith({ASIDE}) for name in stack):
            modules.update(stack)
sys.setprofile(profile)
from unfog.cli.main import main
try:
    main(sys.argv[1:])
finally:
    sys.setprofile(None)
    print("\\n".join(sorted(modules)))
"""


@dataclass
class Figures:
    """What is measured of a checkout."""

    lines: int = 0
    code: int = 0
    comments: int = 0
    public: int = 0
    docstrings: int = 0
    riddles: list[str] = field(default_factory=list)
    brief: list[str] = field(default_factory=list)
    wide: list[str] = field(default_factory=list)
    long: list[str] = field(default_factory=list)
    long_modules: list[str] = field(default_factory=list)
    folders: Counter[str] = field(default_factory=Counter)
    rings: list[list[str]] = field(default_factory=list)
    modules: int = 0
    label: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    bytes: list[str] = field(default_factory=list)
    latents: list[str] = field(default_factory=list)
    autoencoder: list[str] = field(default_factory=list)
    loss_loops: list[str] = field(default_factory=list)
    way: list[str] = field(default_factory=list)
    private: list[str] = field(default_factory=list)
    reached: list[str] = field(default_factory=list)
    loop: str = ""


def documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (name, docstring) of the module and of each class and function in it."""
    for node in ast.walk(tree):
        if isinstance(node, (*Function, ast.ClassDef, ast.Module)) and (docstring := ast.get_docstring(node)):
            yield getattr(node, "name", ""), docstring


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters, without self and cls."""
    a = function.args
    return sum(one.arg not in ("self", "cls") for one in (*a.posonlyargs, *a.args, *a.kwonlyargs))


def imported(tree: ast.Module, known: set[str]) -> set[str]:
    """Return the modules that a module imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module} in line {node.lineno}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known


def loops_of_losses(tree: ast.Module) -> list[str]:
    """Return the functions with a loop that calls a loss of given noise: `loss_at`, or the `at` of an objective."""
    names, found = re.compile(r"(?:\w*objective\.|\.)at|(?:\w+\.)*loss_at"), []
    for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
        loops = (node for node in ast.walk(function) if isinstance(node, Loop))
        calls = (node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Call) and len(node.args) > 3)
        if any(names.fullmatch(ast.unparse(call.func)) for call in calls):
            found.append(function.name)
    return found


def asked(name: str, text: str, word: re.Pattern[str]) -> list[str]:
    """Return the lines of the module of this name and text that ask for `word`, with their places."""
    if name == "unfog.values.image_format":  # which is there to know it
        return []
    # An assert states for the type checker what was decided elsewhere, and a comment asks nothing.
    numbered = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if '"""' not in line]
    numbered = [(number, line) for number, line in numbered if not line.startswith(("assert ", "#"))]
    return [f"{name}:{number}: {line}" for number, line in numbered if word.search(line)]


def rings(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other through imports."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for name in arrows.get(left.pop(), set()) - seen:
                seen.add(name)
                left.append(name)
        return seen

    reach = {name: reached(name) for name in arrows}
    groups = {frozenset(b for b in arrows if b in reach[a] and a in reach[b]) for a in arrows if a in reach[a]}
    return sorted((sorted(group) for group in groups), key=len, reverse=True)


def measure(root: Path) -> Figures:
    """Measure the package below `root`/src."""
    source, figures, trees = root / "src" / "unfog", Figures(), {}
    for file in sorted(source.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        parts = ("unfog", *file.relative_to(source).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = tree = ast.parse(text)
        lines = text.splitlines()
        for found, word in ((figures.label, LABEL), (figures.labels, LABELS)):
            if count := len(word.findall(text)):
                found.append(f"{name}: {count}")
        places = ((figures.bytes, BYTES), (figures.latents, LATENTS), (figures.autoencoder, AUTOENCODER))
        for found, word in places:
            found += asked(name, text, word)
        figures.loss_loops += [f"{name}:{function}" for function in loops_of_losses(tree)]
        figures.lines += len(lines)
        figures.code += sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        figures.comments += sum(token.type == tokenize.COMMENT for token in tokens)
        figures.public += sum(
            isinstance(n, (*Function, ast.ClassDef)) and not n.name.startswith("_") for n in tree.body
        )
        if len(lines) > LONG_MODULE:
            figures.long_modules.append(f"{name}: {len(lines)}")
        if file.name != "__init__.py":
            figures.folders[str(file.parent.relative_to(source.parent))] += 1
        for owner, docstring in documented(tree):
            figures.docstrings += 1
            where = f"{name}:{owner}: {docstring.splitlines()[0]}"
            if docstring.split()[0].strip(",:`") in RIDDLES:
                figures.riddles.append(where)
            if len(docstring.split()) <= BRIEF:
                figures.brief.append(where)
        for node in ast.walk(tree):
            if isinstance(node, Function):
                if parameters(node) >= WIDE:
                    figures.wide.append(f"{name}:{node.name}: {parameters(node)}")
                if (length := (node.end_lineno or 0) - node.lineno + 1) > LONG:
                    figures.long.append(f"{name}:{node.name}: {length}")
    known = set(trees)
    packages = {name for name in known if any(other.startswith(f"{name}.") for other in known)}
    graph = {name: imported(tree, known) - packages - {name} for name, tree in trees.items() if name not in packages}
    figures.rings, figures.modules = rings(graph), len(trees)
    read = next(files for files in LOOP if all((source / file).exists() for file in files))
    figures.loop = f"{sum(len((source / file).read_text().splitlines()) for file in read):,} ({len(read)})"
    figures.way = way_of_the_learning_rate(root)
    figures.private = private_imports(root)
    figures.reached = private_parts(root, set(trees))
    return figures


def private_imports(root: Path) -> list[str]:
    """Return the names with a leading underscore that tests import without a reason in a comment, with their places."""
    found = []
    for file in sorted((root / "tests").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unfog"):
                if "  # " in lines[node.lineno - 1]:
                    continue
                names = [alias.name for alias in node.names if re.match(r"_(?!_)", alias.name)]
                found += [f"{file.relative_to(root)}:{node.lineno}: {node.module}.{name}" for name in names]
    return found


def private_parts(root: Path, modules: set[str]) -> list[str]:
    """Return the private functions and classes that tests reach through their module, such as `module._part`.

    A comment at the import of the module is the reason for all of them. Limits in capitals are left out: a test lowers
    them to be quick.
    """
    found = set()
    for file in sorted((root / "tests").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        lines, tree, names = text.splitlines(), ast.parse(text), set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and "  # " not in lines[node.lineno - 1]:
                names |= {one.asname or one.name for one in node.names if f"{node.module}.{one.name}" in modules}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
                is_part = re.match(r"_[a-z]|_[A-Z]\w*[a-z]", node.attr) and "  # " not in lines[node.lineno - 1]
                if is_part:
                    found.add(f"{file.relative_to(root)}: {node.value.id}.{node.attr}")
    return sorted(found)


def way_of_the_learning_rate(root: Path) -> list[str]:
    """Return the modules between `--lr` on the command line and the optimizer, in a run of one step."""
    with tempfile.TemporaryDirectory() as place:
        network = "unet:channels=8/16,attention=0/1,mid_attention=0,norm_groups=4,head_channels=8"
        flags = ("--lr", str(LR), "--steps", "1", "--batch", "4", "--network", network, "--precision", "fp32")
        few = ("--evaluate.every", "-1", "--preview.images", "1", "--sampler.steps", "1", "--out", f"{place}/run")
        environment = os.environ | {"PYTHONPATH": str(root / "src"), "UNFOG_CACHE": f"{place}/cache"}
        command = [sys.executable, "-c", TRACER, "train", "fashion", *flags, *few]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return [line for line in lines if line.startswith("unfog.")]


ROWS: list[tuple[str, str, Callable[[Figures], object]]] = [
    (
        "modules in the largest folder",
        "15",
        lambda f: f"{f.folders.most_common(1)[0][1]} ({f.folders.most_common(1)[0][0]})",
    ),
    ("modules", "about 175", lambda f: f.modules),
    ("lines", "31,000", lambda f: f"{f.lines:,}"),
    ("import cycles: modules in each", "none", lambda f: ", ".join(str(len(ring)) for ring in f.rings) or "none"),
    ("public top-level names", "650", lambda f: f"{f.public:,}"),
    ("modules with the word label", "40", lambda f: len(f.label)),
    ("modules with label or labels, alone or in a name", "", lambda f: len(f.labels)),
    ("places with 127.5, or that make memory for images", "0", lambda f: len(f.bytes)),
    ("places that ask whether the network sees latents", "2", lambda f: len(f.latents)),
    ("places that ask whether an autoencoder is trained", "2", lambda f: len(f.autoencoder)),
    ("functions with a loop of per-image losses", "1", lambda f: len(f.loss_loops)),
    ("functions with 6 or more parameters", "30", lambda f: len(f.wide)),
    ("functions of more than 40 lines", "", lambda f: len(f.long)),
    ("modules of more than 500 lines", "", lambda f: len(f.long_modules)),
    ("docstrings that begin What, Whether, Who, …", "3%", lambda f: f"{100 * len(f.riddles) / f.docstrings:.1f}%"),
    ("docstrings of five words or fewer", "0", lambda f: len(f.brief)),
    ("modules from --lr to the optimizer", "12", lambda f: len(f.way)),
    ("to understand the loop: lines (files)", "900 (6)", lambda f: f.loop),
    ("private names of the package that tests import without a reason", "", lambda f: len(f.private)),
    ("private parts that tests reach through their module without a reason", "", lambda f: len(f.reached)),
    ("comments per 100 lines of code", "6", lambda f: f"{100 * f.comments / f.code:.1f}"),
]


def check_out(commit: str, place: Path) -> Path:
    """Write the files of a commit into a folder."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(place, filter="data")
    return place


def main() -> None:
    """Print the table, or the places."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=BASE, help="commit to compare with")
    parser.add_argument("--show", action="store_true", help="list the places instead")
    asked = parser.parse_args()
    here = measure(ROOT)
    if asked.show:
        for title in (
            "riddles",
            "brief",
            "wide",
            "long",
            "long_modules",
            "rings",
            "label",
            "labels",
            "bytes",
            "latents",
            "autoencoder",
            "loss_loops",
            "way",
            "private",
            "reached",
        ):
            print(f"## {title}", *getattr(here, title), sep="\n")
        sys.exit()
    with tempfile.TemporaryDirectory() as place:
        before = measure(check_out(asked.base, Path(place)))
    print(f"| measured | {asked.base} | here | aim |\n|---|---|---|---|")
    for title, aim, value in ROWS:
        print(f"| {title} | {value(before)} | {value(here)} | {aim} |")


if __name__ == "__main__":
    main()
