"""File systems that grant every lock, as some network file systems do: one process trains, packs or draws at a time."""

import json
import time
from pathlib import Path

import pytest

from faults.harness import USUAL, Job, assert_same, long_form, newest, snapshot, step_reached, steps_saved
from unfog.files.locks import LOCK, Owner

LYING = "import fcntl; fcntl.flock = lambda *_: None\nfrom unfog.cli.main import main\nmain()"


def both(*commands: list[object]) -> list[Job]:
    """Begin commands at once, and wait for their ends."""
    jobs = [Job(*words, script=LYING) for words in commands]
    for job in jobs:
        job.process.wait(200)
    return sorted(jobs, key=lambda job: job.process.returncode)


def test_of_two_that_train_into_one_folder_one_does(whole, tmp_path, faults):
    run = tmp_path / "run"
    with faults.tried("two trainings begin in one folder, with locks that lie"):
        first, second = both(USUAL.words(run), USUAL.words(run))
        first.ends(0)
        second.ends(2)
        assert_same(run, whole)


def test_who_comes_second_is_refused_and_who_is_taken_over_stops(whole, tmp_path, faults):
    run = tmp_path / "run"
    with faults.tried("a second process resumes a run in training, with locks that lie"):
        job = Job(*USUAL._replace(steps=2000, every=4).words(run), script=LYING)
        job.until(lambda: step_reached(run) >= 4)
        assert "another process" in Job("resume", run, script=LYING).ends(2)
        # Another machine does not see this process, and takes the folder over.
        other = Owner(kernel="0" * 8, space=0, pid=77, start=0, random="0" * 16, host="elsewhere")
        (run / LOCK).write_text(f"{other} 1")
        said = job.ends(1)
        assert "77 on elsewhere" in said
        assert "has taken over" in said
        kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
        assert "failed" not in kinds
        assert str(other) in (run / LOCK).read_text()
        left = snapshot(run / "checkpoints")
        time.sleep(0.5)
        assert snapshot(run / "checkpoints") == left


def test_a_run_that_was_killed_is_resumed_at_once(tmp_path, faults):
    run = tmp_path / "run"
    with faults.tried("kill -9, with locks that lie"):
        job = Job(*USUAL._replace(steps=2000).words(run), script=LYING)
        job.until(lambda: steps_saved(run)[-1:] >= [4])
        job.kill()
        assert (run / LOCK).exists()
        again = Job("resume", run, script=LYING)
        step = step_reached(run)
        assert again.until(lambda: step_reached(run) > step + 4, 60)
        assert "another process" not in again.said


def test_of_two_that_draw_into_one_folder_one_does(whole, tmp_path, faults):
    out, words = tmp_path / "out", ["sample", whole, "-n", 12, "--steps", 2]
    with faults.tried("two draw samples into one folder, with locks that lie"):
        first, second = both([*words, "--seed", 1, "--out", out], [*words, "--seed", 2, "--out", out])
        first.ends(0)
        assert "another" in second.ends(2)
        seeds = {b"seed 1" in path.read_bytes() for path in out.glob("0*.png")}
        assert len(seeds) == 1


@long_form
def test_of_two_that_export_into_one_folder_one_does(whole, tmp_path, faults):
    with faults.tried("two export into one folder, with locks that lie"):
        first, second = both(["export", whole, tmp_path / "out"], ["export", whole, tmp_path / "out"])
        first.ends(0)
        assert "another process" in second.ends(second.process.returncode)
        assert second.process.returncode in (1, 2)
        assert (tmp_path / "out" / "model.safetensors").is_file()
        assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("kill", [False, True])
def test_two_make_one_entry_of_the_cache(tmp_path, faults, monkeypatch, kill):
    from test_data_prepare import fill

    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))
    photos = fill(tmp_path / "set", 400)
    recipe = USUAL._replace(source=str(photos), flags={"--evaluate.every": -1, "--size": 16, "--data.cache": "disk"})
    short = recipe._replace(steps=1, every=1)
    with faults.tried("two decode the same images, with locks that lie"):
        if kill:
            job = Job(*short.words(tmp_path / "killed"), script=LYING)
            job.until(lambda: list(tmp_path.glob("cache/*.partial/journal.jsonl")))
            job.kill()
        for job in both(*(short.words(tmp_path / name) for name in "ab")):
            job.ends(0)
        assert newest(tmp_path / "a").name == newest(tmp_path / "b").name
        assert not list(Path(tmp_path / "cache").glob("*.partial"))
