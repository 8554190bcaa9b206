"""The mirror of a run: a copy that any moment is whole, resumes like the run, and never stops training."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forked
import unfog
from conftest import FEW_PICTURES, TRANSFORMER, few_images
from unfog.errors import RequestError
from unfog.reporting.records import read_events
from unfog.training.checkpoints.format import list_checkpoints, newest
from unfog.training.checkpoints.mirror import Copied, Mirror, check_mirror, copy_run

SETTINGS: dict[str, Any] = {
    "size": 16,
    "network": TRANSFORMER,
    "batch": 4,
    "device": "cpu",
    "evaluate": {"every": -1},
    "checkpoint": {"every": 1, "keep": 2},
    **FEW_PICTURES,
}
# Copies a run, and is killed after so many blocks.
KILLED = """
import os, signal, sys, threading
from pathlib import Path
from unfog.training.checkpoints import mirror

copied, mirror._BLOCK = 0, 2**10

class Source:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *error): self.file.close()
    def readline(self, size): return self.file.readline(size)
    def read(self, size):
        global copied
        copied += 1
        if copied > int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.file.read(size)

plain = mirror.open_file
mirror.open_file = lambda *args: Source(plain(*args))
mirror.copy_run(Path(sys.argv[1]), Path(sys.argv[2]), {}, threading.Event())
print("whole")
"""


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    """A run of three steps, and its mirror."""
    folder = tmp_path_factory.mktemp("mirrored")
    unfog.train(few_images(), out=folder / "run", steps=3, mirror=folder / "drive" / "run", **SETTINGS)
    return folder / "run", folder / "drive" / "run"


def steps(run: Path) -> list[int]:
    return [one.step for one in list_checkpoints(run / "checkpoints")[0]]


def contents(run: Path) -> dict[str, bytes]:
    files = [file for file in run.rglob("*") if file.is_file() and not file.name.startswith(".")]
    # The console log ends with a line on the mirror itself.
    own = ("heartbeat.json", "console.log")
    return {str(file.relative_to(run)): file.read_bytes() for file in files if file.name not in own}


def copy(run: Path, place: Path, seen: dict[str, tuple[int, int]] | None = None) -> Copied:
    return copy_run(run, place, {} if seen is None else seen, threading.Event())


@pytest.mark.slow
def test_the_mirror_is_the_run_at_its_end_without_what_is_of_the_process(mirrored):
    run, mirror = mirrored
    assert contents(mirror) == contents(run)
    assert not (mirror / "heartbeat.json").exists()
    assert 3 in steps(mirror)
    kinds = [event["kind"] for event in read_events(run / "events.jsonl")]
    assert "mirrored" in kinds


@pytest.mark.slow
def test_a_run_resumes_from_its_mirror_and_a_copy_of_it_goes_on_mirroring(mirrored, tmp_path):
    _, mirror = mirrored
    shutil.copytree(mirror, tmp_path / "drive")
    before = contents(mirror)
    unfog.resume(tmp_path / "drive", steps=4, mirror="")
    assert max(steps(tmp_path / "drive")) == 4
    assert contents(mirror) == before  # which is of the run, whose copy goes on without it
    shutil.copytree(mirror, tmp_path / "local")
    unfog.resume(tmp_path / "local", steps=4, mirror=tmp_path / "drive2")
    assert contents(tmp_path / "drive2") == contents(tmp_path / "local")


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 4, 12, 40, 90])
def test_a_copy_that_is_killed_leaves_a_whole_mirror(mirrored, tmp_path, blocks):
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    shutil.copytree(mirrored[0], run)
    # The first copy, and one on top of an older checkpoint.
    for before in ([], [max(steps(run))]):
        shutil.rmtree(mirror, ignore_errors=True)
        if before:
            aside = tmp_path / "aside"
            shutil.move(run / "checkpoints" / f"{before[0]:08d}", aside)
            copy(run, mirror)
            shutil.move(aside, run / "checkpoints" / f"{before[0]:08d}")
        had = steps(mirror)
        done = forked.run([run, mirror, blocks], KILLED)
        assert done.returncode == -signal.SIGKILL or "whole" in done.stdout, done.stderr
        saved, broken = list_checkpoints(mirror / "checkpoints")
        assert not broken
        assert {one.step for one in saved} >= set(had)
        assert all(one.find_damage() is None for one in saved)
        assert not saved or newest(mirror / "checkpoints")[0] is not None
        assert saved or not (mirror / "metrics.jsonl").exists()
        # Another process completes it.
        assert check_mirror(run, str(mirror), new=False) == mirror
        copy(run, mirror)
        assert contents(mirror) == contents(run)
        assert not list((mirror / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_only_what_is_new_is_copied_and_what_the_run_removed_is_removed(mirrored, tmp_path):
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    shutil.copytree(mirrored[0], run)
    seen: dict[str, tuple[int, int]] = {}
    assert copy(run, mirror, seen).bytes > 0
    assert copy(run, mirror, seen).bytes == 0
    assert copy(run, mirror).bytes == 0, "another process compares sizes and times"
    (mirror / "notes.txt").write_text("mine")
    (run / "samples").mkdir(exist_ok=True)
    (run / "samples" / "new.png").write_bytes(b"new")
    (mirror / "samples" / "old.png").write_bytes(b"old")
    oldest, *_, last = steps(run)
    shutil.rmtree(run / "checkpoints" / f"{oldest:08d}")
    result = copy(run, mirror, seen)
    assert (result.bytes, result.step) == (3, last)
    assert steps(mirror) == steps(run)
    assert (mirror / "notes.txt").exists()
    assert not (mirror / "samples" / "old.png").exists()
    # A damaged checkpoint is not copied, and the earlier ones stay.
    shutil.rmtree(mirror / "checkpoints" / f"{last:08d}")
    weights = run / "checkpoints" / f"{last:08d}" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(OSError, match="sha256"):
        copy(run, mirror)
    assert last not in steps(mirror)


@pytest.mark.slow
def test_a_mirror_that_cannot_be_written_is_named_and_training_goes_on(tmp_path, capsys):
    place = tmp_path / "drive"
    place.mkdir()
    (place / "checkpoints").symlink_to(tmp_path)  # a link is not followed
    place.chmod(0o755)
    run = tmp_path / "run"
    with pytest.raises(RequestError, match="not empty"):
        unfog.train(few_images(), out=run, steps=2, mirror=place, **SETTINGS)
    (place / "checkpoints").unlink()

    class Break:
        def on_checkpoint(self, event: Any) -> None:
            if place.is_dir():  # at the first checkpoint, before anything is copied
                place.rmdir()
                place.write_text("a file")

    unfog.train(few_images(), out=run, steps=2, mirror=place, callbacks=[Break()], **SETTINGS)
    said = capsys.readouterr()
    assert "was not updated" in said.out + said.err
    assert f"{run} is complete" in said.out + said.err
    assert "mirror_failed" in [event["kind"] for event in read_events(run / "events.jsonl")]
    assert max(steps(run)) == 2


@pytest.mark.parametrize(
    ("mirror", "said"),
    [("run", "in each other"), ("run/below", "in each other"), (".", "in each other"), ("s3://bucket/x", "mount"),
     ("file", "is a file"), ("used", "not empty")],
)  # fmt: skip
def test_folders_that_cannot_be_a_mirror(tmp_path, monkeypatch, mirror, said):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("used").mkdir()
    Path("used", "notes").write_text("")
    with pytest.raises(RequestError, match=said):
        check_mirror(Path("run"), mirror, new=True)


def test_a_resume_refuses_the_mirror_of_another_run_and_one_with_later_steps(tmp_path, monkeypatch):
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    for folder, time in ((run, 1), (mirror, 2)):
        folder.mkdir()
        (folder / "events.jsonl").write_text(f'{{"time": {time}}}\n')
    with pytest.raises(RequestError, match="another run"):
        check_mirror(run, str(mirror), new=False)
    (mirror / "events.jsonl").write_text('{"time": 1}\n{"time": 2}\n')
    assert check_mirror(run, str(mirror), new=False) == mirror
    assert check_mirror(run, str(run), new=False) is None
    monkeypatch.setattr(
        "unfog.training.checkpoints.mirror.list_checkpoints",
        lambda folder: ([SimpleNamespace(step=9 if folder.parent == mirror else 4)], []),
    )
    with pytest.raises(RequestError, match="resume"):
        check_mirror(run, str(mirror), new=False)


def test_one_pass_runs_at_a_time_and_requests_are_joined(tmp_path, monkeypatch):
    """However often a run saves while a slow mirror is copied, one pass follows."""
    begun, go, passes = threading.Event(), threading.Event(), []

    def slow(*args: Any) -> Copied:
        passes.append(threading.active_count())
        begun.set()
        assert go.wait(120)
        return Copied(1, 0, 0.0)

    monkeypatch.setattr("unfog.training.checkpoints.mirror.copy_run", slow)
    mirror = Mirror(tmp_path, tmp_path / "mirror")
    mirror.request()
    assert begun.wait(120)
    for _ in range(5):
        mirror.request()
    assert not mirror.wait(0.01)
    go.set()
    assert mirror.wait(120)
    assert len(passes) == len(mirror.news()) == 2
    assert os.listdir(tmp_path) == []


def test_a_folder_without_an_identity_is_no_mirror(mirrored, tmp_path):
    """A run from before there were events has no identity; another folder then has the same, and its files go."""
    run = tmp_path / "run"
    shutil.copytree(mirrored[0], run)
    (run / "events.jsonl").unlink()
    (tmp_path / "docs" / "samples").mkdir(parents=True)
    (tmp_path / "docs" / "samples" / "mine.txt").write_text("mine")
    with pytest.raises(RequestError, match="holds another run"):
        check_mirror(run, str(tmp_path / "docs"), False)


def test_a_mirror_keeps_what_is_damaged_in_the_run_and_nothing_of_a_killed_removal(mirrored, tmp_path):
    run, place = tmp_path / "run", tmp_path / "place"
    shutil.copytree(mirrored[0], run)
    copy_run(run, place, {}, threading.Event())
    kept = steps(place)
    (place / ".mirror").write_bytes(b"of a run that was there before\n")
    (place / "checkpoints" / ".old-00000001").mkdir()
    (run / "checkpoints" / f"{kept[0]:08d}" / "manifest.json").write_text("{")
    copy_run(run, place, {}, threading.Event())
    assert steps(place) == kept
    assert not list((place / "checkpoints").glob(".*"))
    assert check_mirror(run, str(place), False) == place
