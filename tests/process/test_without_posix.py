"""What Windows lacks is not needed: commands run without its modules, signals and /proc, as `no_posix` takes them away.

A shortcut for tests of every command there, which this machine cannot run. It is no proof that they pass.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from conftest import QUIET, TRANSFORMER
from no_posix import THEN
from package_source import trees

PROGRAM = Path(__file__).parents[1] / "no_posix.py"
SIZE = ["--network", TRANSFORMER, "--size", "16"]
RUN = [*SIZE, "--batch", "4", "--device", "cpu", *QUIET]


def test_fields_of_files_that_windows_lacks_are_not_taken_for_granted():
    lacking = {"st_blocks", "st_blksize", "st_rdev", "st_flags"}
    found = {
        path: {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for path, tree in trees().items()
    }
    assert len(found) > 30
    assert [path for path, names in found.items() if names & lacking] == []


@pytest.mark.slow
def test_commands_work_without_posix(tmp_path):
    """One process runs them all, as it takes seconds to import what must be there before POSIX is taken away."""
    photos, run, pictures = tmp_path / "photos", tmp_path / "run", tmp_path / "pictures"
    photos.mkdir()
    for number in range(12):
        Image.effect_noise((20, 20), 20.0 * number).save(photos / f"{number}.png")
    commands = {
        "version": ("--version",),
        "train": ("train", photos, "--steps", 2, "--out", run, "--mirror", tmp_path / "mirror", *RUN),
        "resume": ("resume", run, "--steps", 3),
        "sample": ("sample", run, "-n", 2, "--steps", 2, "--out", pictures),
        "runs": ("runs", run),
        "doctor": ("doctor", photos, "--quick", "--out", tmp_path / "report", *SIZE),
    }
    said = outputs(commands)
    assert said["version"].startswith("unfog ")
    assert len(list(pictures.glob("*.png"))) >= 2
    assert (tmp_path / "mirror" / "checkpoints" / "00000003" / "manifest.json").is_file()
    assert "finished" in said["runs"]
    assert "report.html" in said["doctor"]


def outputs(commands: dict[str, tuple[object, ...]]) -> dict[str, str]:
    """Run commands of unfog as on Windows, and return what each says, which must be in code page 1252."""
    # One thread, as torch is imported before Unfog can make idle ones sleep.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [str(word) for command in commands.values() for word in (*command, THEN)][:-1]
    process = [sys.executable, PROGRAM, *words]
    done = subprocess.run(
        process, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, timeout=300, check=False
    )
    output = done.stdout.decode("cp1252")
    assert done.returncode == 0, output
    assert "bug in unfog" not in output, output
    return dict(zip(commands, output.split(f"{THEN}\n"), strict=True))
