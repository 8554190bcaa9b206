"""What a release consists of agrees with the package: versions, requirements, files of the images."""

import importlib
import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import unfog

ROOT = Path(unfog.__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "packaging").exists(), reason="installed without its repository")


SOURCE, SITE = "https://host/us/unfog", "https://us.host/unfog"


@pytest.fixture(autouse=True)
def scripts_import_each_other(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """scripts/addresses.py on a copy of the files that it writes, with addresses in [project.urls]."""
    addresses = importlib.import_module("addresses")
    for name in ("pyproject.toml", *addresses.LINES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    project = tmp_path / "pyproject.toml"
    urls = f'[project.urls]\nSource = "{SOURCE}"\nDocumentation = "{SITE}/"\n\n[project.scripts]'
    project.write_text(project.read_text("utf-8").replace("[project.scripts]", urls), "utf-8")
    monkeypatch.setattr(addresses, "ROOT", tmp_path)
    return addresses


def test_addresses_of_the_project_go_from_one_place_to_all_files(filled, tmp_path):
    assert filled.main(["--check"]) == 1
    assert filled.main([]) == 0
    assert filled.main(["--check"]) == 0
    assert tomllib.loads((tmp_path / "zensical.toml").read_text("utf-8"))["project"]["site_url"] == f"{SITE}/"
    texts = {name: (tmp_path / name).read_text("utf-8") for name in filled.LINES}
    assert f"\nrepository-code: {SOURCE}\nurl: {SITE}\n" in texts["CITATION.cff"]
    assert f"\nabout:\n  homepage: {SITE}\n  repository: {SOURCE}\n" in texts["packaging/conda/recipe.yaml"]
    assert f"    url: {SOURCE}/security/advisories/new\n" in texts[".github/ISSUE_TEMPLATE/config.yml"]
    # Another address replaces the first, and without one the files are as they were.
    moved = (tmp_path / "pyproject.toml").read_text("utf-8").replace("/us", "/them")
    (tmp_path / "pyproject.toml").write_text(moved, "utf-8")
    assert filled.main([]) == 0
    assert [name for name in filled.LINES if "/us/" in (tmp_path / name).read_text("utf-8")] == []
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    assert filled.main([]) == 0
    assert all((tmp_path / name).read_bytes() == (ROOT / name).read_bytes() for name in filled.LINES)


def test_an_upload_demands_addresses_and_a_release_that_all_files_have_them(filled):
    release = runpy.run_path(str(ROOT / "scripts" / "release.py"))
    assert any("does not have the addresses" in line for line in release["problems"](unfog.__version__, upload=False))
    shutil.copyfile(ROOT / "pyproject.toml", filled.ROOT / "pyproject.toml")
    assert any("has no [project.urls]" in line for line in release["problems"](unfog.__version__, upload=True))


def test_the_description_on_an_index_of_packages_has_no_dead_link(monkeypatch):
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["Description"]()
    hook.root = str(ROOT)
    plain, linked = {}, {"urls": {"Source": f"{SOURCE}/"}}
    hook.update(plain)
    hook.update(linked)
    for text in (plain["readme"]["text"], linked["readme"]["text"]):
        assert text.count('pip install "unfog[all]"') == 3
        assert "not on PyPI" not in text
        assert not re.findall(r"\]\((?!https?://)[^)]*\)", text)
    targets = re.findall(rf"\]\({SOURCE}/(blob|raw)/v{re.escape(unfog.__version__)}/([^)#]+)", linked["readme"]["text"])
    assert len(targets) > 40
    assert [path for _, path in targets if not (ROOT / path).exists()] == []
    assert ("raw", "docs/hero.webp") in targets
    assert "hero.webp" not in plain["readme"]["text"]


def test_nothing_is_in_the_way_of_a_release_but_its_date():
    release = runpy.run_path(str(ROOT / "scripts" / "release.py"))
    assert release["version"]() == unfog.__version__
    assert release["problems"](unfog.__version__, upload=False) == []
    assert len(release["problems"]("9.9.9", upload=False)) == 3


def test_conda_asks_for_what_pip_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
    lines = recipe.partition("  run:\n")[2].partition("\n\n")[0].split("\n")
    wanted = {Requirement(line.strip(" -").replace("pytorch", "torch")) for line in lines}
    asked = {Requirement(line) for line in project["dependencies"]}
    assert wanted == asked | {Requirement(f"python{project['requires-python']}")}


def test_the_extra_all_has_every_extra_of_users():
    """trackio would hold pillow back, and whoever asks for everything."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    assert Requirement(everything).extras == set(extras) - {"all", "dev", "release", "trackio"}


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images_are_built_of_files_that_are_there(name):
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    copied = [line.split()[1:-1] for line in (ROOT / name).read_text().splitlines() if line.startswith("COPY")]
    files = {file for line in copied for file in line}
    assert files
    assert all((ROOT / file).exists() for file in files)
    assert files == let_through
