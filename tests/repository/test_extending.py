"""The pages on extending the package: the code that they show is complete, and passes the tests that they show."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from conftest import TRANSFORMER
from unfog import custom
from unfog.data.sources import registry

PAGES = Path(__file__).parents[2] / "docs" / "extending"
MODULES = {page.stem: name for page in PAGES.glob("*.md") if (name := re.search(r"`(my_\w+)\.py`", page.read_text()))}
CHANGES = {"condition": 3, "stored-type": 2, "value-map": 3}
"""Pages that change the package, with the most files that the change of each may take."""
# Settings of the trainings on the pages that change the package.
TINY = """
import pytest

@pytest.fixture
def settings():
    few = {"preview": {"every": -1, "images": 1}, "evaluate": {"every": -1}}  # some pages set the sampler themselves
    return {"size": 16, "network": "NETWORK", "steps": 1, "batch": 4, "device": "cpu"} | few
""".replace("NETWORK", TRANSFORMER)


@pytest.fixture(autouse=True)
def _registrations_end_with_the_test(monkeypatch):
    monkeypatch.setattr(registry, "_registered", list(registry._registered))
    before = {section: dict(words) for section, words in custom.REGISTERED.items()}
    yield
    for section, words in custom.REGISTERED.items():
        words.clear()
        words.update(before.get(section, {}))


@pytest.mark.parametrize(
    "page", ["sampler", "weighting", "loss", "network", "image-source", "tracker", "checkpoint-entry"]
)
@pytest.mark.slow
def test_the_code_of_a_page_works(page, tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)
    assert len(blocks) == 3, "the file, its use from Python, its test"
    name = MODULES[page][1]
    (tmp_path / f"{name}.py").write_text(blocks[0])
    (tmp_path / f"{name}_tests.py").write_text(blocks[2])
    monkeypatch.syspath_prepend(tmp_path)
    compile(blocks[1], page, "exec")
    try:
        tests = [test for test in vars(import_module(f"{name}_tests")).items() if test[0].startswith("test_")]
        assert tests
        for number, (_, test) in enumerate(tests):
            folder = tmp_path / str(number)
            folder.mkdir()
            test(**({"tmp_path": folder} if "tmp_path" in inspect.signature(test).parameters else {}))
    finally:
        for module in (name, f"{name}_tests"):
            sys.modules.pop(module, None)


def files_of(change: str) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)", change, re.MULTILINE)


def change_of(page: str) -> str:
    (change,) = re.findall(r"```diff\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)
    return change


@pytest.mark.parametrize(("page", "most"), CHANGES.items())
def test_the_change_of_a_page_fits_the_package_and_takes_few_files(page, most, tmp_path):
    assert len(files_of(change_of(page))) <= most
    (tmp_path / "change.diff").write_text(change_of(page))
    # Not in a repository further up, as git would leave out files that are not of it.
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(PAGES.parents[2])}
    check = ["git", "apply", "--check", "--unidiff-zero", str(tmp_path / "change.diff")]
    done = subprocess.run(check, cwd=PAGES.parents[1], env=outside, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_changes_of_the_pages_work(tmp_path):
    """A copy of the package, changed as the pages show, passes the tests that they show.

    The changes are made together, as each process that imports a package and torch takes seconds.
    """
    copy = tmp_path / "package"
    shutil.copytree(PAGES.parents[1] / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "conftest.py").write_text(TINY)
    # Outside of any repository, as git would otherwise leave out files that are not of it.
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path), "PYTHONPATH": str(copy / "src")}
    names = []
    for page in CHANGES:
        (tests,) = re.findall(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)
        names.append(f"test_{page.replace('-', '_')}.py")
        (copy / names[-1]).write_text(tests)
        (tmp_path / "change.diff").write_text(change_of(page))
        subprocess.run(["git", "apply", "--unidiff-zero", "../change.diff"], cwd=copy, env=outside, check=True)
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", *names]
    done = subprocess.run(run, cwd=copy, env=outside, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def pages():
    repository = PAGES.parent.parent
    return [
        *PAGES.parent.rglob("*.md"),
        *(repository / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ]


def test_every_link_to_a_file_leads_somewhere():
    found = []
    for page in pages():
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        links = re.findall(r"\]\(([^)#\s]+)", prose)
        found += [f"{page.name}: {link}" for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not found, "\n".join(found)


def test_how_a_run_works_names_what_exists():
    source = "\n".join(module.read_text() for module in Path(registry.__file__).parents[2].rglob("*.py"))
    quoted = re.findall(r"`([A-Za-z_][\w.]*)`", (PAGES.parent / "how-a-run-works.md").read_text())
    words = {word for text in quoted for word in text.split(".") if "_" in word or re.search(r"[a-z][A-Z]", word)}
    assert not [word for word in sorted(words) if word not in source]
