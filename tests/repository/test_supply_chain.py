"""What is installed is what was pinned, and nothing in the package reads files in a way that could run them."""

import ast
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import unfog
from package_source import trees
from unfog.process.child import python_command

PACKAGE = Path(unfog.__file__).parent
ROOT = PACKAGE.parent.parent
CONSTRAINTS = ROOT / "constraints.txt"

pytestmark = pytest.mark.skipif(not CONSTRAINTS.exists(), reason="installed without its repository")


def pins() -> dict[str, str]:
    """Package -> the one version that constraints.txt allows here."""
    found: dict[str, str] = {}
    for line in CONSTRAINTS.read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is there twice"
            if requirement.marker is None or requirement.marker.evaluate():
                found[name] = str(requirement.specifier)
    return found


def brought_by(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """Every package that this one brings with it here, however indirectly."""
    found: set[tuple[str, frozenset[str]]] = set()

    def walk(name: str, extras: frozenset[str]) -> None:
        if (name, extras) in found:
            return
        found.add((name, extras))
        for line in distribution(name).requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in (*extras, "")):
                walk(canonicalize_name(requirement.name), frozenset(requirement.extras))

    walk(name, extras)
    return {found_name for found_name, _ in found}


@pytest.mark.slow
def test_every_package_is_pinned_at_the_version_installed():
    try:
        names = brought_by("unfog", frozenset(["dev"])) - {"unfog"}
    except PackageNotFoundError as error:
        pytest.skip(f"not all of unfog[dev] is installed here: {error}")
    assert len(names) > 50
    allowed = pins()
    if distribution("torch").version.partition("+")[0] == allowed["torch"].removeprefix("=="):
        names.remove("torch")  # whose version has a suffix for the build
    else:  # a machine may lend its own torch, and what that needs; see the Makefile
        names -= brought_by("torch")
    installed = {name: f"=={distribution(name).version}" for name in names}
    wrong = {name: (version, allowed.get(name)) for name, version in installed.items() if allowed.get(name) != version}
    assert not wrong, f"(installed, pinned): {wrong}; `make test` installs what is pinned"


def test_pins_are_exact():
    assert pins().pop("torchvision") == "<0"
    for name, version in pins().items():
        assert name == "torchvision" or (version.startswith("==") and "*" not in version and "," not in version), name


def test_the_build_is_pinned_too():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for line in project["build-system"]["requires"]:
        assert str(Requirement(line).specifier).startswith("=="), line


# What runs code that it reads, or a shell, or writes where an archive says.
BUILT_IN = {"eval", "exec", "compile", "__import__"}
METHODS = {"extractall", "unsafe_load", "system", "popen"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
HARMLESS_YAML = {"safe_load", "safe_dump"}


# Code that a person names on the command line, after consent; never of a run.
GIVEN_BY_A_PERSON = {"pipeline/measurement.py"}


def complaints(source: ast.Module) -> list[str]:
    """What a module's source does that it must not."""
    found = []
    for node in ast.walk(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = {module, *(alias.name for alias in node.names)}
            found += [f"imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
            found += ["imports names of yaml"] if module == "yaml" else []  # else its calls are looked at
        if not isinstance(node, ast.Call):
            continue
        name, of = _name(node.func)
        given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
        if name in METHODS or (name in BUILT_IN and of in ("", "builtins")):  # model.eval() is another
            found.append(f"line {node.lineno} calls {name}")
        if of == "yaml" and name not in HARMLESS_YAML:
            found.append(f"line {node.lineno} calls yaml.{name}")
        if given.get("shell") is True:
            found.append(f"line {node.lineno} opens a shell")
        if name == "load" and of == "torch" and given.get("weights_only") is not True:
            found.append(f"line {node.lineno} loads a pickle without weights_only=True")
        if name == "load" and of in {"np", "numpy"} and given.get("allow_pickle", False) is not False:
            found.append(f"line {node.lineno} lets numpy read a pickle")
        if given.get("trust_remote_code") is True:
            found.append(f"line {node.lineno} trusts remote code")
    return found


def _name(function: ast.expr) -> tuple[str, str]:
    """(name, name that it is called on) of a called function: torch.load is ("load", "torch")."""
    if isinstance(function, ast.Attribute):
        return function.attr, getattr(function.value, "id", "a value")
    return (function.id, "") if isinstance(function, ast.Name) else ("", "")


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.utils, dill",
        "yaml.load(text)",
        "from yaml import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=wanted)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "compile(text, '', 'exec')",
        "os.system('ls')",
        "os.popen('ls')",
        "subprocess.run(command, shell=True)",
        "archive.extractall(folder)",
        "Model.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_search_finds(line):
    assert complaints(ast.parse(line))


def test_the_search_lets_pass_what_is_harmless():
    harmless = "model.eval()\nre.compile('a')\ntorch.load(path, weights_only=True)\nyaml.safe_load(text)"
    assert not complaints(ast.parse(harmless))


@pytest.mark.slow
def test_nothing_runs_what_it_reads():
    assert len(trees()) > 30
    found = {place: complaints(tree) for place, tree in trees().items()}
    assert {path for path, said in found.items() if said} == GIVEN_BY_A_PERSON
    assert [len(found[path]) for path in GIVEN_BY_A_PERSON] == [2]


def test_the_readme_says_how_to_leave_cuda_out():
    """The torch of PyPI brings 3 GB of CUDA packages on Linux."""
    assert "Without a GPU choose CPU" in (ROOT / "README.md").read_text()
    assert "PIP_EXTRA_INDEX_URL" in (ROOT / "docs/install.md").read_text()


def test_python_is_started_without_the_current_folder_on_its_import_path():
    """CWE-427: `python -m` puts it first, and it may be a stranger's."""
    files = [path for path in PACKAGE.rglob("*.py") if "sys.executable" in path.read_text()]
    starting = {path.relative_to(PACKAGE).as_posix() for path in files}
    assert starting <= {"process/child.py", "process/slurm_job.py"}
    assert python_command("unfog", "plan")[1:] == ("-P", "-m", "unfog", "plan")
    assert "export PYTHONSAFEPATH=1" in (PACKAGE / "process/slurm_job.py").read_text()


@pytest.mark.slow
def test_python_m_unfog_takes_packages_from_where_they_are_installed(tmp_path):
    for name in ("numpy.py", "torch.py", "tomllib.py", "safetensors.py"):
        (tmp_path / name).write_text("raise SystemExit(99)")
    words = [sys.executable, "-m", "unfog", "plan", "fashion", "--size", "8x"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert "--size got '8x'" in done.stderr
