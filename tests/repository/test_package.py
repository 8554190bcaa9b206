"""What a release consists of agrees with the package: versions, requirements, files of the images."""

import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import unfog

ROOT = Path(unfog.__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "packaging").exists(), reason="installed without its repository")


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
