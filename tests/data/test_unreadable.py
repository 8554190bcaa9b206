"""A checkpoint that cannot be read at this moment may be whole: it is neither passed over, set aside nor deleted."""

import errno
import os

import numpy as np
import pytest
import torch

import unfog
from conftest import FEW_PICTURES, TRANSFORMER
from test_checkpoint import trained, write
from unfog.diffusion.objective import Objective
from unfog.errors import RequestError, RunError
from unfog.reporting.records import read_events
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import rotation
from unfog.training.checkpoints.load import find_rollback_checkpoint, read_state
from unfog.training.settings import Checkpoint


@pytest.fixture
def failing(monkeypatch):
    """Returns a function after which opening a file of this name fails so many times, and lists the attempts."""
    monkeypatch.setattr(checkpoint, "_RETRY_SECONDS", (0.0, 0.0))
    opened = os.open

    def install(name: str, number: int, times: int = 1000) -> list[str]:
        attempts = []

        def fail(path, *rest, **named):
            if os.path.basename(path) == name and len(attempts) < times:
                attempts.append(str(path))
                raise OSError(number, os.strerror(number), path)
            return opened(path, *rest, **named)

        monkeypatch.setattr(os, "open", fail)
        return attempts

    return install


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "state.json"])
def test_what_cannot_be_read_now_stops_with_the_reason(tmp_path, failing, name, number):
    for step in (2, 3):
        write(trained(), tmp_path, step)
    attempts = failing(name, number)
    for read in (lambda: checkpoint.newest(tmp_path), lambda: checkpoint.find_checkpoint(tmp_path, 3)):
        with pytest.raises(RunError, match=rf"checkpoint 0000000\d cannot be read now .*{os.strerror(number)}"):
            read()
    assert len(attempts) >= 6
    rotation.remove_leftovers(tmp_path, checkpoint.list_checkpoints(tmp_path)[1])
    rotation.remove_old_checkpoints(tmp_path, Checkpoint(keep=1))
    assert {path.name for path in tmp_path.iterdir()} >= {"00000003"}
    assert not list(tmp_path.glob(".broken-*"))


def test_an_error_that_passes_is_waited_for(tmp_path, failing):
    write(trained(), tmp_path)
    for name in ("manifest.json", "ema.safetensors"):
        assert len(failing(name, errno.EIO, times=1)) == 0
        saved, broken = checkpoint.newest(tmp_path)
        assert (saved.step, broken) == (3, [])


def test_a_second_broken_checkpoint_of_a_step_does_not_remove_the_first(tmp_path):
    for _ in range(3):
        folder = write(trained(), tmp_path)
        (folder / "manifest.json").write_text("{}")
        rotation.remove_leftovers(tmp_path, checkpoint.list_checkpoints(tmp_path)[1])
    assert {path.name for path in tmp_path.iterdir()} == {f".broken-00000003{end}" for end in ("", "-2", "-3")}


def test_what_a_broken_checkpoint_has_replaced_comes_back(tmp_path):
    old = write(trained(), tmp_path)
    old.rename(tmp_path / ".replaced-00000003")
    (write(trained(), tmp_path) / "model.safetensors").write_bytes(b"torn")
    rotation.restore_replaced(tmp_path)
    saved, broken = checkpoint.newest(tmp_path)
    assert (saved.step, broken) == (3, [])
    assert {path.name for path in tmp_path.iterdir()} == {"00000003", ".broken-00000003"}


def test_a_broken_one_is_set_aside_where_folders_cannot_be_renamed(tmp_path, monkeypatch):
    """overlayfs answers EXDEV for a folder of the image below."""
    folder = write(trained(), tmp_path)
    (folder / "manifest.json").write_text("{}")
    replace = os.replace

    def refuse(source, target, **named):
        if os.path.basename(source) == folder.name:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        replace(source, target, **named)

    monkeypatch.setattr(os, "replace", refuse)
    rotation.remove_leftovers(tmp_path, checkpoint.list_checkpoints(tmp_path)[1])
    assert [path.name for path in tmp_path.iterdir()] == [".broken-00000003"]
    assert (tmp_path / ".broken-00000003/manifest.json").read_text() == "{}"


@pytest.mark.slow
def test_a_roll_back_says_which_damaged_checkpoint_it_passes_over(tmp_path, monkeypatch, capsys):
    undisturbed, left, run = Objective.__call__, [torch.nan] * 8, tmp_path / "run"
    newest = run / "checkpoints/00000008"

    def disturbed(self, network, x0, *rest):
        loss = undisturbed(self, network, x0, *rest)
        if left and newest.exists():
            (newest / "ema.safetensors").write_bytes(b"torn")
            return loss._replace(per_image=loss.per_image * left.pop())
        return loss

    monkeypatch.setattr(Objective, "__call__", disturbed)
    images = np.random.default_rng(0).integers(0, 256, (16, 8, 8), np.uint8)
    settings = {"training": {"patience": 2}, "checkpoint": {"every": 8}, **FEW_PICTURES}
    unfog.train(images, out=run, steps=20, batch=8, network=TRANSFORMER, device="cpu", **settings)
    back, *_ = (event for event in read_events(run / "events.jsonl") if event["kind"] == "rolled_back")
    passed, *_ = (event for event in read_events(run / "events.jsonl") if event["kind"] == "passed_over")
    assert back["to"] == 0
    assert (passed["step"], passed["checkpoint"]) == (back["step"], "00000008")
    assert "ema.safetensors has 4 bytes of" in passed["reason"]
    assert "checkpoint 00000008 is broken and is passed over" in capsys.readouterr().err
    assert "passed_over" in (run / "report.html").read_text()


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_roll_back_does_not_pass_over_what_cannot_be_read_now(tmp_path, failing, name):
    state = trained()
    for step in (2, 3):
        write(state, tmp_path, step, anchor=True)
    failing(name, errno.EIO)
    with pytest.raises(RunError, match=r"checkpoint 0000000\d cannot be read now"):
        find_rollback_checkpoint(tmp_path, state, patience=2)


@pytest.mark.slow
def test_names_that_could_not_be_read_again_are_refused_before_training(tmp_path):
    images = np.zeros((4, 8, 8, 1), np.uint8)
    labels = [f"{i}{'x' * 1_100_000}" for i in range(4)]
    with pytest.raises(RequestError, match=r"names of all classes take 4.4 MB.*--data.labels none"):
        unfog.train(images, labels=labels, out=tmp_path / "run", steps=2, network=TRANSFORMER, device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_long_state_is_read_again_and_one_too_long_replaces_nothing(tmp_path, monkeypatch):
    state = trained()
    state.lost_shards = {f"https://example.org/photos-{i:06d}.tar": "it answered 503" for i in range(20_000)}
    write(state, tmp_path)
    assert len(read_state(checkpoint.newest(tmp_path)[0].folder)["lost_shards"]) == 20_000
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    monkeypatch.setattr(checkpoint, "LARGEST_JSON", 2**20)
    with pytest.raises(ValueError, match=r"state\.json has over 1,048,576 bytes"):
        write(state, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == before
