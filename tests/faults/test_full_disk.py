"""Disks that are too small, fill up, run out of inodes or become read-only: nothing saved is lost, and it goes on.

Previews are not compared: one that falls into the time without room is left out, which is said.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from faults.harness import (
    GRACE,
    USUAL,
    Job,
    assert_same,
    long_form,
    newest,
    resume,
    snapshot,
    step_reached,
    steps_saved,
    train,
)
from faults.mounts import SmallDisk
from unfog.diffusion.noise import Flow
from unfog.errors import RunError
from unfog.pipeline.denoising_pictures import DenoisingAnimation
from unfog.values.image_format import ImageFormat

SIZE = "size=40m"
FULL_DISK = "the disk is full"
PATIENCE = 5  # seconds that a stop may wait for room
WAITS = 2  # seconds that the disk stays full


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[str], SmallDisk]]:
    """Makes file systems that are gone after the test."""
    disks: list[SmallDisk] = []

    def make(options: str = SIZE) -> SmallDisk:
        disks.append(SmallDisk(tmp_path / f"disk-{len(disks)}", options))
        return disks[-1]

    yield make
    Job.end_all()
    for disk in disks:
        disk.remove()


def begun(run: Path, *more: object) -> Job:
    """A run that has saved itself a few times."""
    job = train(USUAL, run, *more)
    assert job.until(lambda: len(steps_saved(run)) >= 3)
    return job


def test_too_small_for_two_checkpoints_is_refused_with_a_forecast(small_disk, faults):
    with faults.tried("disk too small for two checkpoints"):
        disk = small_disk("size=1500k")
        said = train(USUAL, disk.path / "run").ends(status=2, seconds=60)
        assert "MB" in said
        assert "two checkpoints" in said
        assert not (disk.path / "run").exists()


def test_full_while_training_waits_and_goes_on(whole, small_disk, faults):
    with faults.tried("disk full, then free again") as attempt:
        disk = small_disk()
        run = disk.path / "run"
        job = begun(run)
        filler = disk.fill()
        job.until(lambda: FULL_DISK in job.said)
        kept = snapshot(newest(run))
        job.outlives(WAITS)
        assert job.running, job.said
        assert snapshot(newest(run)) == kept
        filler.unlink()
        said = job.ends()
        assert said.count(FULL_DISK) == 1, said
        assert_same(run, whole, pictures=False)
        written, wanted = snapshot(run / "averages"), snapshot(whole / "averages")
        assert written.items() <= wanted.items(), "a snapshot of averages is whole or absent"
        for name in wanted.keys() - written.keys():
            assert f"the EMA snapshot of step {int(Path(name).stem)} could not be written" in said
        attempt.lost.append(0)


@long_form
@pytest.mark.parametrize("way", ["SIGTERM", "STOP"])
def test_full_and_asked_to_stop_leaves_in_time_with_what_it_has(whole, small_disk, faults, way):
    with faults.tried("disk full and asked to stop") as attempt:
        disk = small_disk()
        run = disk.path / "run"
        job = begun(run, "--training.grace", PATIENCE)
        filler = disk.fill()
        job.until(lambda: FULL_DISK in job.said)
        kept, last = snapshot(newest(run)), steps_saved(run)[-1]
        job.ask(way, run)  # an empty file such as STOP takes an inode, of which there are enough
        said = job.ends(status=1, seconds=PATIENCE + GRACE)
        assert "disk is full" in said
        assert "resume" in said
        assert snapshot(newest(run)) == kept
        filler.unlink()
        attempt.lost.append(max(0, step_reached(run) - last))
        resume(run, "--training.grace", 30).ends()
        assert_same(run, whole, pictures=False)


@long_form
def test_killed_while_the_disk_is_full(whole, small_disk, faults):
    with faults.tried("disk full and kill -9") as attempt:
        disk = small_disk()
        run = disk.path / "run"
        job = begun(run)
        filler = disk.fill(leave=300_000)  # room for the beginning of a checkpoint
        assert job.until(lambda: FULL_DISK in job.said)
        job.kill()
        last = steps_saved(run)[-1]
        filler.unlink()
        attempt.lost.append(max(0, step_reached(run) - last))
        resume(run).ends()
        assert_same(run, whole, pictures=False)


@long_form
def test_resumed_on_a_full_disk(whole, small_disk, faults):
    """It waits, or refuses with what is to be done; either way nothing is lost."""
    with faults.tried("resumed on a full disk") as attempt:
        disk = small_disk()
        run = disk.path / "run"
        begun(run).kill()
        filler, kept = disk.fill(), snapshot(run / "checkpoints")
        job = resume(run)
        if job.outlives(10):
            assert FULL_DISK in job.said
        else:
            assert job.process.returncode in (1, 2)
            assert "room" in job.said or "space" in job.said, job.said
        now = snapshot(run / "checkpoints")
        assert all(now.get(name) == content for name, content in kept.items() if not name.startswith("."))
        filler.unlink()
        if not job.running:
            job = resume(run)
        job.ends()
        assert_same(run, whole, pictures=False)
        attempt.lost.append(0)


@long_form
def test_inodes_run_out(whole, small_disk, faults):
    with faults.tried("inodes exhausted, then free again") as attempt:
        disk = small_disk("size=100m,nr_inodes=300")
        run = disk.path / "run"
        job = begun(run)
        many = disk.fill_inodes()
        kept = snapshot(newest(run))
        job.outlives(WAITS)
        assert snapshot(newest(run)) == kept
        shutil.rmtree(many)
        if job.running:
            job.ends()
        else:
            assert job.process.returncode == 1, job.said
            assert "No space left" in job.said
            attempt.lost.append(max(0, step_reached(run) - steps_saved(run)[-1]))
            resume(run).ends()
        assert_same(run, whole, pictures=False)


@long_form
@pytest.mark.parametrize("what", ["checkpoints", "."])
def test_read_only_while_training(whole, small_disk, faults, what):
    with faults.tried("file system turned read-only") as attempt:
        disk = small_disk()
        run = disk.path / "run"
        job = begun(run)
        with disk.read_only(run / what):
            kept = snapshot(newest(run))
            job.outlives(WAITS)
            assert snapshot(newest(run)) == kept
        if job.running:
            job.ends()
        else:
            assert job.process.returncode == 1, job.said
            assert "Read-only file system" in job.said
            attempt.lost.append(max(0, step_reached(run) - steps_saved(run)[-1]))
            resume(run).ends()
        assert_same(run, whole, pictures=False)


@pytest.mark.parametrize("size", ["8k", pytest.param("100k", marks=long_form), "400k"])
def test_a_video_for_which_the_temporary_disk_has_no_room_is_refused(small_disk, tmp_path, monkeypatch, size):
    pytest.importorskip("imageio_ffmpeg")
    rng = np.random.default_rng(0)
    animation = DenoisingAnimation(Flow(), 12, ImageFormat(3, 8, 8).to_view)
    animation._frames = [rng.integers(0, 256, (16, 64, 64, 3), np.uint8) for _ in range(12)]
    monkeypatch.setattr("tempfile.tempdir", str(small_disk(f"size={size}").path))
    with pytest.raises(RunError, match="TMPDIR"):
        animation.save(tmp_path / "a.mp4", animation._frames[0])
    assert list(tmp_path.glob("*.mp4")) == []
    full = small_disk("size=64k")
    with pytest.raises(RunError, match=r"No space left on device.*the samples are whole"):
        animation.save(full.path / "a.gif", animation._frames[0])
    assert list(full.path.iterdir()) == []
