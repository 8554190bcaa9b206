"""What the worker of the playground draws, with a tiny network in this process: steps, cancellation, edits, copies."""

import os
import shutil
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import NETWORK, few_images
from image_bytes import png
from studio_jobs import Said, draw, pixels
from unfog.config.toml import to_toml
from unfog.errors import RequestError, RunError
from unfog.inference import memorization
from unfog.serve.playground import studio, worker_process
from unfog.serve.playground.channel import Channel, Message, Worker, read_message, write_message
from unfog.serve.playground.drawing import newest_checkpoint, python_of, read_request
from unfog.serve.playground.queue import DrawingQueue
from unfog.serve.playground.studio import Studio, find_copies


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for i in range(48):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{i}.png")
    settings = {"network": NETWORK, "device": "cpu", "precision": "fp32", "batch": 8, "preview": {"images": 4}}
    return unfog.train(folder, out=tmp_path_factory.mktemp("runs") / "drawn", steps=2, sampler={"steps": 4}, **settings)


@pytest.mark.slow
def test_the_python_that_the_page_shows_draws_the_pictures(run):
    asked = {"seed": 3, "steps": 2, "checkpoint": 2, "weights": "raw", "guide": "none"}
    code = python_of(read_request(run.path, {"n": 2, **asked}, False, False))
    assert "step=2" in code
    names = {}
    exec(code, names)
    shown = unfog.load(run.path, step=2, weights="raw").sample(2, seed=3, steps=2)
    assert np.array_equal(names["images"], shown)
    assert not np.array_equal(names["images"], run.sample(2, seed=3, steps=2))


@pytest.mark.slow
def test_every_step_is_sent_and_the_pictures_are_those_of_sample(run):
    said = draw(run, seed=3)
    (began,), (done,) = said.of("began"), said.of("done")
    assert (began.head["steps"], began.head["batches"], began.head["size"]) == (4, 1, 8)
    assert [step.head["number"] for step in said.of("step")] == [0, 1, 2, 3]
    shares = [step.head["share"] for step in said.of("step")]
    assert shares == sorted(shares, reverse=True)
    assert np.array_equal(pixels(done), run.sample(2, seed=3))
    assert not done.head["stopped"]
    first, last = (np.frombuffer(said.of("step")[i].body, np.uint8).reshape(2, 2, 8, 8, 3) for i in (0, -1))
    noise = first[0].astype(float) / 127.5 - 1
    assert 0.6 < noise.std() < 0.8  # unit variance, clipped to [-1, 1]
    assert np.array_equal(last[1], pixels(done))  # into the clean level, a step ends at its guess


def test_a_drawing_ends_within_a_step(run):
    said = draw(run, until=1, n=3)
    assert said.count("step") == 2
    (done,) = said.of("done")
    assert (done.head["stopped"], done.head["images"]) == (True, (0, 8, 8, 3))


def test_the_adaptive_sampler_is_shown_image_by_image(run):
    said = draw(run, n=2, sampler="adaptive")
    assert said.of("began")[0].head["batches"] == 2
    assert {step.head["first"] for step in said.of("step")} == {0, 1}
    assert {tuple(step.head["tiles"]) for step in said.of("step")} == {(1, 8, 8, 3)}


@pytest.mark.slow
def test_large_pictures_are_drawn_in_several_batches_and_shown_smaller(run, monkeypatch):
    monkeypatch.setattr(studio, "_BATCH_PIXELS", 2 * 64)
    monkeypatch.setattr(studio, "_TILE", 4)
    monkeypatch.setattr(studio, "_STEP_BYTES", 2 * 3 * 4 * 4 * 3 * 2)
    said = draw(run, n=3)
    assert [(step.head["first"], step.head["number"]) for step in said.of("step")] == [(0, 0), (0, 2), (2, 0), (2, 2)]
    assert said.of("step")[0].head["tiles"] == (2, 4, 4, 3)
    assert np.array_equal(pixels(said.of("done")[0]), run.sample(3, batch=2))


@pytest.mark.slow
def test_known_pixels_are_checked_to_the_bit(run, monkeypatch):
    photo = np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8)
    mask = np.zeros((8, 8), np.uint8)
    mask[:, 5:] = 255
    said = draw(run, image=png(photo), mask=png(mask), repeats=2)
    (done,) = said.of("done")
    assert done.head["kept"] == {"pixels": 40, "equal": True}
    assert (pixels(done)[:, :, :5] == photo[:, :5]).all()
    assert said.of("began")[0].head["steps"] == said.count("step") == 8
    monkeypatch.setattr(studio.Run, "sample", lambda *args, **more: np.zeros((2, 8, 8, 3), np.uint8))
    assert not draw(run, image=png(photo), mask=png(mask), repeats=2).of("done")[0].head["kept"]["equal"]


@pytest.mark.slow
def test_image_to_image_and_interpolation(run):
    photo = np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8)
    said = draw(run, image=png(photo), strength=0.5)
    assert said.count("step") == 2
    assert "kept" not in said.of("done")[0].head
    between = pixels(draw(run, n=3, seed=1, to_seed=2).of("done")[0])
    assert np.array_equal(between, run.sample(3, seed=1, to_seed=2))


def test_copies_are_told_from_new_pictures(run):
    known = np.stack([np.asarray(Image.open(run.config.source + f"/{i}.png")) for i in range(2)])
    new = np.random.default_rng(9).integers(0, 256, (1, 8, 8, 3), np.uint8)
    drawn, said = np.concatenate([known, new]), Said()
    find_copies(said, 7, Message({"run": str(run.path), "images": drawn.shape}, drawn.tobytes()))
    (found,) = said.messages
    assert [one["copy"] for one in found.head["pictures"]] == [True, True, False]
    assert found.head["pictures"][0]["ratio"] == 0 < found.head["pictures"][2]["ratio"]
    assert found.head["unseen"]["what"] == "of your own images, each against the others,"
    assert found.head["usual"] == memorization.COPY
    nearest = pixels(found).reshape(3, found.head["shown"], 8, 8, 3)
    assert np.array_equal(nearest[:2, 0], known)


def test_the_limit_of_a_copy_falls_where_unseen_images_have_near_relatives():
    def images(ratios):
        distances = torch.ones(len(ratios), 9)
        distances[:, 0] = ratios
        return memorization._NearestImages(distances, distances.long())

    usual = memorization.Nearness(images(torch.ones(2)), images(torch.linspace(0.8, 1, 40)), "held-out images", 40)
    near = memorization.Nearness(images(torch.ones(2)), images(torch.linspace(0.2, 1, 40)), "held-out images", 40)
    assert usual.limit == memorization.COPY
    assert near.limit < 0.12


def test_training_images_that_have_changed_are_not_searched(run, monkeypatch):
    drawn = np.zeros((1, 8, 8, 3), np.uint8)
    monkeypatch.setattr(memorization, "FEWEST", 4)
    monkeypatch.setattr("unfog.serve.playground.studio.FEWEST", 1000)
    with pytest.raises(RequestError, match="at least 1000"):
        find_copies(Said(), 7, Message({"run": str(run.path), "images": drawn.shape}, drawn.tobytes()))


@contextmanager
def working():
    """A worker in a thread of this process; yields what sends it a message, and returns its answer of an event."""
    (source, out), (answers, target) = os.pipe(), os.pipe()
    channel = Channel(os.fdopen(source, "rb"), os.fdopen(target, "wb"))
    thread = threading.Thread(target=worker_process.serve, args=(channel,))
    thread.start()
    with os.fdopen(out, "wb") as pipe, os.fdopen(answers, "rb") as told:

        def ask(event, **head):
            write_message(pipe, head)
            while (answer := read_message(told).head)["event"] != event:
                assert answer["event"] not in ("failed", "done"), answer
            return answer

        yield ask
        pipe.close()
        thread.join(30)
    assert not thread.is_alive()  # it ends with its server


def test_a_worker_goes_on_after_a_job_that_fails(run):
    job = {"op": "draw", "run": str(run.path), "weights": {"device": "cpu", "step": None}}
    with working() as ask:
        told = ask("failed", **job, job=1, settings={"n": 1, "label": ["hat"]})
        assert told["job"] == 1
        assert "no classes" in told["error"]
        assert ask("done", **job, job=2, settings={"n": 1})["images"] == [1, 8, 8, 3]


def test_an_unexpected_error_is_said(monkeypatch):
    def fail(self, channel, job, message):
        raise MemoryError("no room")

    monkeypatch.setattr(studio.Studio, "draw", fail)
    with working() as ask:
        assert ask("failed", op="draw", job=1)["error"] == "MemoryError: no room"


def _caused_by(error, kind=RunError):
    outer = kind("drawing failed")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (_caused_by(RuntimeError("CUDA error: device-side assert triggered")), True),
        (_caused_by(RuntimeError("CUDA error: device-side assert triggered"), RuntimeError), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("shapes do not fit"), False),
    ],
    ids=["kernel", "cudnn", "caused", "wrapped", "memory", "other"],
)
def test_a_worker_ends_with_its_gpu(error, ends, monkeypatch):
    """No work on a GPU succeeds in the process any more, but of memory there may be enough for the next drawing."""

    def fail(self, channel, job, message):
        raise error

    monkeypatch.setattr(studio.Studio, "draw", fail)
    jobs = [Message({"op": "draw", "job": number}) for number in (1, 2)]
    said = []
    channel = SimpleNamespace(
        next_job=lambda: jobs.pop(0) if jobs else None, send=lambda event, job, **facts: said.append((job, facts))
    )
    worker_process.serve(channel)
    assert [job for job, _ in said] == ([1] if ends else [1, 2])
    assert str(error) in said[0][1]["error"]
    assert said[0][1]["ends"] == ends


def test_code_that_a_run_names_is_not_run_without_consent(run, tmp_path, monkeypatch):
    folder = tmp_path / "strange"
    shutil.copytree(run.path, folder)
    sampler = replace(run.config.sampler, kind="custom:path=mine_code.Step")
    (folder / "config.toml").write_text(to_toml(replace(run.config, sampler=sampler)))
    (tmp_path / "mine_code.py").write_text("raise SystemExit('it was run')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RequestError, match=r"UNFOG_TRUST=mine_code\.Step"):
        Studio().draw(Said(), 1, Message({"run": str(folder), "weights": {"device": "cpu"}, "settings": {"n": 1}}))


class Watching:
    """A callback that draws from the newest checkpoint of a run that trains, in a worker of its own."""

    def __init__(self, run, queue):
        self.run, self.queue, self.drawn = run, queue, []

    def on_checkpoint(self, event):
        if newest_checkpoint(self.run) is not None:
            request = read_request(self.run, {"n": 1, "steps": 2, "seed": len(self.drawn)}, False, False)
            job = self.queue.submit(1, "watched", request, newest=True)
            while job.state in ("waiting", "drawing"):
                time.sleep(0.05)
            self.drawn.append(job)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_that_is_drawn_from_while_it_trains_has_the_bits_of_one_that_nobody_watched(tmp_path):
    settings = {"network": NETWORK, "device": "cpu", "precision": "fp32", "batch": 8, "preview": {"images": 1}}
    more = {"steps": 4, "checkpoint": {"every": 1}, "evaluate": {"every": 4}, "sampler": {"steps": 2}}
    with closing(DrawingQueue(lambda _: None, lambda: True, Worker())) as queue:
        watching = Watching(tmp_path / "watched", queue)
        for name, callbacks in (("alone", []), ("watched", [watching])):
            unfog.train(few_images(), out=tmp_path / name, callbacks=callbacks, **settings, **more)
        assert [job.state for job in watching.drawn].count("done") >= 2, [job.error for job in watching.drawn]
        assert queue.worker.nice == 10
    for name in ("model", "ema", "optimizer"):
        files = [tmp_path / run / "checkpoints" / "00000004" / f"{name}.safetensors" for run in ("alone", "watched")]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    names = [sorted(one.name for one in (tmp_path / run).iterdir()) for run in ("alone", "watched")]
    assert names[0] == names[1]
