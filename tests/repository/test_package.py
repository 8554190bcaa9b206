"""What a release consists of agrees with the package: versions, requirements, files of the images."""

import importlib
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement

import unfog

ROOT = Path(unfog.__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(not (ROOT / "packaging").exists(), reason="installed without its repository"),
    pytest.mark.usefixtures("scripts_on_path"),
]

SOURCE, SITE = "https://host/us/unfog", "https://us.host/unfog"
URLS = f'[project.urls]\nSource = "{SOURCE}"\nDocumentation = "{SITE}/"\n\n'


@pytest.fixture
def addresses(tmp_path, monkeypatch):
    """scripts/addresses.py on a copy of the files that it writes, of a project that has no address."""
    addresses = importlib.import_module("addresses")
    for name in ("pyproject.toml", *addresses.LINES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    monkeypatch.setattr(addresses, "ROOT", tmp_path)
    set_urls(addresses, "")
    addresses.main([])
    return addresses


def set_urls(addresses, urls):
    """Put a table in place of [project.urls], if there is one."""
    project = addresses.ROOT / "pyproject.toml"
    text = re.sub(r"^\[project\.urls\]\n(?:[^\[\n].*\n)*\n", "", project.read_text("utf-8"), flags=re.MULTILINE)
    project.write_text(text.replace("[project.scripts]", f"{urls}[project.scripts]"), "utf-8")


def test_a_release_that_is_started_by_hand_publishes_nothing():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))["jobs"]
    publishing = [name for name, job in jobs.items() if "gh-action-pypi-publish" in str(job)]
    assert [jobs[name]["if"] for name in publishing] == ["github.event_name == 'push'"]
    assert jobs["rehearse"]["environment"] == jobs[publishing[0]]["environment"]


def test_files_of_dependabot_are_there():
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text("utf-8"))["updates"]
    files = {"github-actions": ".github/workflows", "pip": "constraints.txt", "docker": "Dockerfile"}
    assert {each["package-ecosystem"] for each in updates} == {*files}
    assert all((ROOT / each["directory"].lstrip("/") / files[each["package-ecosystem"]]).exists() for each in updates)


def test_addresses_of_the_project_go_from_one_place_to_all_files(addresses):
    def texts():
        return {name: (addresses.ROOT / name).read_text("utf-8") for name in addresses.LINES}

    without = texts()
    set_urls(addresses, URLS)
    assert addresses.main(["--check"]) == 1
    assert addresses.main([]) == 0
    assert addresses.main(["--check"]) == 0
    assert tomllib.loads(texts()["zensical.toml"])["project"]["site_url"] == f"{SITE}/"
    assert f"\nrepository-code: {SOURCE}\nurl: {SITE}\n" in texts()["CITATION.cff"]
    assert f"\nabout:\n  homepage: {SITE}\n  repository: {SOURCE}\n" in texts()["packaging/conda/recipe.yaml"]
    assert f"    url: {SOURCE}/security/advisories/new\n" in texts()[".github/ISSUE_TEMPLATE/config.yml"]
    # Another address replaces the first, and without one the files are as they were.
    set_urls(addresses, URLS.replace("/us", "/them"))
    assert addresses.main([]) == 0
    assert [name for name, text in texts().items() if "/us/" in text] == []
    set_urls(addresses, "")
    assert addresses.main([]) == 0
    assert texts() == without


def test_an_upload_demands_addresses_and_a_release_that_all_files_have_them(addresses):
    release = runpy.run_path(str(ROOT / "scripts" / "release.py"))
    assert any("has no [project.urls]" in line for line in release["problems"](unfog.__version__, upload=True))
    set_urls(addresses, URLS)
    assert any("does not have the addresses" in line for line in release["problems"](unfog.__version__, upload=False))


def test_the_description_on_an_index_of_packages_has_no_dead_link(monkeypatch):
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["Description"]()
    hook.root = str(ROOT)
    plain = {"version": unfog.__version__}
    linked = {**plain, "urls": {"Source": f"{SOURCE}/"}}
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


def test_the_description_credits_pictures_that_an_index_leaves_out():
    licence = (ROOT / "README.md").read_text("utf-8").rpartition("**Licence:**")[2]
    assert "OpenMoji" in licence
    assert "above" not in licence


def test_licences_are_those_of_what_ships():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    page = (ROOT / "docs/licences.md").read_text("utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and "](" in line]
    named = {path for row in rows for path in re.findall(r"\]\(([^)]+)\)", row[-1])}
    files = {((ROOT / "docs") / path).resolve().relative_to(ROOT).as_posix() for path in named}
    assert {row[1] for row in rows} == {*project["license"].split(" AND ")}
    assert files == {*project["license-files"]}
    assert all((ROOT / file).stat().st_size > 500 for file in files)
    stored = [path for path in (ROOT / "src").rglob("LICENSE*") if "site" not in path.parts]
    assert {path.relative_to(ROOT).as_posix() for path in [*stored, *(ROOT / "docs/licences").iterdir()]} <= files
    recipe = (ROOT / "packaging/conda/recipe.yaml").read_text("utf-8")
    assert f"  license: {project['license']}\n" in recipe
    assert {*re.findall(r"^    - (\S*(?:LICENSE|licences)\S*)$", recipe, re.M)} == files


def test_the_licences_of_the_site_are_those_of_its_generator():
    """An upgrade of Zensical may bring other parts along."""
    zensical = pytest.importorskip("zensical")
    installed = Path(zensical.__file__).parent / "templates"
    known = {"zensical-bundle": "assets/javascripts", "lucide-icons": ".icons/lucide"}
    known |= {"material-icons": ".icons/material", "octicons-icons": ".icons/octicons"}
    for name, folder in known.items():
        text = (installed / folder / "LICENSE").read_text("utf-8")
        assert (ROOT / f"docs/licences/{name}.txt").read_text("utf-8").split() == text.split(), name
    bundle = (ROOT / "docs/licences/zensical-bundle.txt").read_text("utf-8")
    page = (ROOT / "docs/licences.md").read_text("utf-8")
    assert [name for name in re.findall(r"^Package: (.*)@", bundle, re.M) if name not in page] == []


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


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images_read_remote_shards_unless_other_extras_are_asked_for(name):
    """pip takes no empty brackets: `EXTRAS=` is the package alone."""
    text = (ROOT / name).read_text()
    default = re.search(r"^ARG EXTRAS=(.+)$", text, re.MULTILINE)[1]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(default.split(",")) == {"s3", "http"} <= set(extras)
    (words,) = re.findall(r'pip install .* ("\.\$.*") \\$', text, re.MULTILINE)
    for given, expected in ((default, f".[{default}]"), ("all", ".[all]"), ("", ".")):
        shell = ["sh", "-c", f"printf %s {words}"]
        said = subprocess.run(shell, env={"EXTRAS": given, "PATH": "/bin:/usr/bin"}, capture_output=True, text=True)
        assert said.stdout == expected
