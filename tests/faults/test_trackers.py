"""Trackers that fail, and a machine without a network: the run goes on, and says so once."""

import shutil

import pytest

from faults.harness import USUAL, assert_same, events, long_form, newest, resume, train
from faults.mounts import SmallDisk, allowed

RAISES = """
import sys
import unfog.reporting.recorder as recorder

class Sink:
    name = "tensorboard"

    def fail(self, *words):
        raise ConnectionError("the tracker is gone")

    log_scalars = log_histogram = log_image = close = fail

recorder.open_tracker = lambda *words: Sink()
from unfog.cli.main import main
main(sys.argv[1:])
"""
TRACKED = USUAL._replace(name="tracked", flags={"--log.sinks": "tensorboard"})
WANDB = USUAL._replace(name="wandb", flags={"--log.sinks": "wandb"})
# As root a namespace without a network can be had at once; else within a namespace of users.
OFFLINE = [words for words in (["unshare", "-n"], ["unshare", "-rn"]) if allowed([*words, "true"])][:1]


def same_but_for_the_settings(run, whole, tmp_path) -> None:
    """The trackers are in config.toml, also in that of the checkpoint; all else is that of the usual run."""
    shutil.copy(whole / "config.toml", run / "config.toml")
    shutil.copy(newest(whole) / "config.toml", newest(run) / "config.toml")
    assert_same(run, whole)


@long_form
def test_a_tracker_that_raises_is_left_out(whole, tmp_path, faults):
    run = tmp_path / "run"
    with faults.tried("tracker raises on every call") as attempt:
        said = train(TRACKED, run, script=RAISES).ends()
        assert said.count("the tracker is gone") == 1
        assert len(events(run, "sink_failed")) == 1
        same_but_for_the_settings(run, whole, tmp_path)
        attempt.lost.append(0)


@long_form
def test_a_full_disk_under_the_tracker_only(whole, tmp_path, faults):
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    with faults.tried("tracker's disk full") as attempt:
        train(TRACKED._replace(steps=12), run).ends()
        disk = SmallDisk(run / "tensorboard", "size=64k")
        try:
            disk.fill()
            said = resume(run, "--steps", "48").ends()
        finally:
            disk.remove()
        assert said.count("tensorboard failed") == 1
        attempt.lost.append(0)


@long_form
@pytest.mark.skipif(not OFFLINE, reason="needs a namespace without a network")
def test_no_network_for_weights_and_biases(whole, tmp_path, faults):
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    with faults.tried("no network at all") as attempt:
        said = train(WANDB, run, before=OFFLINE[0]).ends()
        assert "failed" not in said
        assert list(run.glob("wandb/offline-run-*"))
        same_but_for_the_settings(run, whole, tmp_path)
        attempt.lost.append(0)


@long_form
@pytest.mark.timeout(600)
@pytest.mark.skipif(not OFFLINE, reason="needs a namespace without a network")
def test_weights_and_biases_online_without_a_network(whole, tmp_path, faults, monkeypatch):
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with faults.tried("tracker wanted online, no network") as attempt:
        said = train(WANDB, run, before=OFFLINE[0]).ends(seconds=400)
        assert said.count("wandb failed") <= 1
        same_but_for_the_settings(run, whole, tmp_path)
        attempt.lost.append(0)
