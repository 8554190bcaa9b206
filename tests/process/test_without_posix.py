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
from package_source import trees

PROGRAM = Path(__file__).parents[1] / "no_posix.py"
SIZE = ["--network", TRANSFORMER, "--size", "16"]
RUN = [*SIZE, "--batch", "4", "--device", "cpu", *QUIET]


def said(*words: object) -> str:
    """Run a command of unfog as on Windows; return its output, which must be in code page 1252."""
    # One thread, as torch is imported before Unfog can make idle ones sleep.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, PROGRAM, *map(str, words)]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=300, check=False)
    output = (done.stdout + done.stderr).decode("cp1252")
    assert done.returncode == 0, output
    assert "bug in unfog" not in output, output
    return output


def test_fields_of_files_that_windows_lacks_are_not_taken_for_granted():
    lacking = {"st_blocks", "st_blksize", "st_rdev", "st_flags"}
    found = {
        path: {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for path, tree in trees().items()
    }
    assert len(found) > 30
    assert [path for path, names in found.items() if names & lacking] == []


@pytest.mark.slow
def test_modules_that_windows_lacks_are_not_imported_at_the_start():
    assert said("--version").startswith("unfog ")


@pytest.mark.slow
def test_a_run_is_trained_resumed_and_sampled_without_posix(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(12):
        Image.effect_noise((20, 20), 20.0 * number).save(photos / f"{number}.png")
    run = tmp_path / "run"
    said("train", photos, "--steps", 2, "--out", run, "--mirror", tmp_path / "mirror", *RUN)
    said("resume", run, "--steps", 3)
    said("sample", run, "-n", 2, "--steps", 2, "--out", tmp_path / "pictures")
    assert len(list((tmp_path / "pictures").glob("*.png"))) >= 2
    assert (tmp_path / "mirror" / "checkpoints" / "00000003" / "manifest.json").is_file()
    assert "finished" in said("runs", run)


@pytest.mark.slow
def test_the_doctor_looks_at_images_without_posix(tmp_path):
    for number in range(12):
        Image.effect_noise((20, 20), 20.0 * number).save(tmp_path / f"{number}.png")
    assert "report.html" in said("doctor", tmp_path, "--quick", "--out", tmp_path / "report", *SIZE)
