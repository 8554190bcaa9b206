"""Callbacks of a run: the events that they get, a run that is the same with them, and what happens when one raises."""

import traceback

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import TRANSFORMER, without_clock
from unfog.callbacks import Callback, CheckpointEvent, EndEvent, LogEvent, SampleEvent
from unfog.errors import RequestError, RunError
from unfog.reporting.records import read_events

IMAGES = np.random.default_rng(0).integers(0, 256, (120, 8, 8, 3), np.uint8)
SETTINGS = {
    "size": 8,
    "batch": 4,
    "lr": 1e-3,
    "network": TRANSFORMER,
    "steps": 4,
    "log": {"every": 2},
    "preview": {"images": 1, "every": 4},
    "checkpoint": {"every": 2},
    "evaluate": {"every": 4, "images": 2},
}


class Everything:
    def __init__(self):
        self.events = []

    def on_log(self, event):
        torch.manual_seed(7)  # must not matter to the run
        torch.rand(5)
        self.events.append(event)

    def on_sample(self, event):
        self.events.append(event)

    def on_checkpoint(self, event):
        assert (event.path / "model.safetensors").is_file()
        self.events.append(event)

    def on_end(self, event):
        self.events.append(event)


class Raises(Callback):
    """Raises an error, or what it is given, at step 2."""

    def __init__(self, error):
        self.error = error

    def on_log(self, event):
        if event.step == 2:
            raise self.error


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    place, callback = tmp_path_factory.mktemp("watched"), Everything()
    return unfog.train(IMAGES, out=place / "run", callbacks=[callback], **SETTINGS), callback.events


def test_every_kind_of_event_is_passed_on(watched):
    run, events = watched
    logs = [one for one in events if isinstance(one, LogEvent)]
    rows = without_clock(run.path / "metrics.jsonl")
    assert [(one.step, one.images, one.loss, one.lr) for one in logs if one.loss is not None] == [
        (row["step"], row["images"], row["loss"], row["lr"]) for row in rows if "loss" in row
    ]
    assert logs[-1].held_out_loss == rows[-1]["held_out_loss"]
    assert len(logs[-1].metrics["loss_by_level"]) == 10
    samples = [one for one in events if isinstance(one, SampleEvent)]
    assert [(one.step, one.name) for one in samples][:2] == [(0, "samples"), (4, "samples")]
    assert all(np.array_equal(np.asarray(Image.open(one.path)), one.grid) for one in samples)
    saved = [one for one in events if isinstance(one, CheckpointEvent)]
    assert [(one.step, one.path.name) for one in saved] == [(0, "00000000"), (2, "00000002"), (4, "00000004")]
    assert isinstance(events[-1], EndEvent)
    assert (events[-1].step, events[-1].finished, events[-1].error) == (4, True, "")
    assert [one.seconds for one in logs] == sorted(one.seconds for one in logs)
    with pytest.raises(AttributeError):
        events[0].step = 3


@pytest.mark.slow
def test_the_run_is_the_same_to_the_bit_without_it(watched, tmp_path):
    plain = unfog.train(IMAGES, out=tmp_path / "run", **SETTINGS)
    ours, theirs = (run.checkpoint.folder / "model.safetensors" for run in (plain, watched[0]))
    assert ours.read_bytes() == theirs.read_bytes()
    ours, theirs = (without_clock(run.path / "metrics.jsonl") for run in (plain, watched[0]))
    assert ours == theirs


@pytest.mark.slow
def test_an_error_of_a_callback_ends_the_run_saved_and_named(tmp_path):
    after = Everything()
    with pytest.raises(RunError, match=r"Raises.on_log raised ValueError: odd") as caught:
        unfog.train(IMAGES, out=tmp_path / "run", callbacks=[Raises(ValueError("odd")), after], **SETTINGS)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)]
    assert frames[-1] == "on_log"
    assert isinstance(after.events[-1], EndEvent)
    assert (after.events[-1].step, after.events[-1].finished) == (2, False)
    assert read_events(tmp_path / "run" / "events.jsonl")[-1]["kind"] == "stopped"
    again = Everything()
    run = unfog.resume(tmp_path / "run", callbacks=[again])
    assert run.checkpoint.step == 4
    assert [one.step for one in again.events if isinstance(one, LogEvent)] == [4]


@pytest.mark.slow
def test_a_keyboard_interrupt_of_a_callback_is_a_ctrl_c(tmp_path):
    with pytest.raises(KeyboardInterrupt, match="stopped, and saved in"):
        unfog.train(IMAGES, out=tmp_path / "run", callbacks=[Raises(KeyboardInterrupt())], **SETTINGS)
    assert (tmp_path / "run" / "checkpoints" / "00000002").is_dir()


@pytest.mark.slow
def test_an_error_of_the_run_itself_reaches_the_callbacks(tmp_path, monkeypatch):
    seen = Everything()
    monkeypatch.setattr("unfog.runs.train.run_training_loop", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        unfog.train(IMAGES, out=tmp_path / "run", callbacks=[seen], **SETTINGS)
    assert (seen.events[-1].finished, seen.events[-1].error) == (False, "ZeroDivisionError: division by zero")


class Elsewhere:
    def on_train_begin(self): ...


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        ([print], r"callbacks\[0\] is of type builtin_function_or_method and is never called: it has no such method"),
        (
            [Everything(), Elsewhere()],
            r"callbacks\[1\] is of type Elsewhere and is never called: it has on_train_begin; ",
        ),
        ([Everything], r"callbacks\[0\] is the class Everything; give an object of it: Everything\(\)"),
        (3, r"callbacks\[0\] is of type int"),
    ],
)
def test_what_can_never_be_called_is_refused_before_any_work(callbacks, said, tmp_path):
    for call in (unfog.train, unfog.train_autoencoder, unfog.resume):
        with pytest.raises(RequestError, match=said):
            call(tmp_path / "nosuch", callbacks=callbacks)
