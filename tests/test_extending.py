"""The pages on extending the package: the code that they show is complete, and passes the tests that they show."""

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from unfog import custom
from unfog.data.sources import registry

PAGES = Path(__file__).parent.parent / "docs" / "extending"
MODULES = {page.stem: name for page in PAGES.glob("*.md") if (name := re.search(r"`(my_\w+)\.py`", page.read_text()))}


@pytest.fixture(autouse=True)
def _registrations_end_with_the_test(monkeypatch):
    monkeypatch.setattr(registry, "_registered", list(registry._registered))
    before = {section: dict(words) for section, words in custom.REGISTERED.items()}
    yield
    for section, words in custom.REGISTERED.items():
        words.clear()
        words.update(before.get(section, {}))


@pytest.mark.parametrize("page", ["sampler", "weighting", "network", "image-source", "tracker", "checkpoint-entry"])
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
