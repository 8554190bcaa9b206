"""The playground of `unfog serve`: protocol, queue, requests, uploads, votes, routes; by a worker without torch."""

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import threading
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("orjson")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from hostile import CONTENTS
from image_bytes import png
from served import make_run
from unfog.cli.read_request import read_request as from_words
from unfog.errors import RequestError, RunError
from unfog.files.cache_folder import CacheEntry
from unfog.serve.playground import blind_comparison  # its interval has published values
from unfog.serve.playground.channel import ProtocolError, Worker, read_message, write_message
from unfog.serve.playground.drawing import (
    History,
    StoredDrawing,
    command_of,
    key_of,
    python_of,
    read_request,
    settings_of,
)
from unfog.serve.playground.images import Uploads, at_run_size, disagreement, sheet
from unfog.serve.playground.inputs import Inputs
from unfog.serve.playground.queue import MOST_WAITING, DrawingQueue
from unfog.serve.run_files import decode_picture
from unfog.serve.server import Server
from unfog.values.image_format import ImageFormat

with warnings.catch_warnings():  # which client it uses is nothing to us
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

from unfog.serve.playground import drawing_routes
from unfog.serve.run_routes import build_app
from waiting import wait_until

FAKE = (sys.executable, str(Path(__file__).parents[1].joinpath("fake_worker.py")))


def make_drawable(folder, steps=(10, 20)):
    """A run with checkpoints, as far as the server looks at them."""
    make_run(folder)
    config = folder / "config.toml"
    lines = [line for line in config.read_text().splitlines() if not line.startswith(("size =", "channels ="))]
    config.write_text("\n".join(lines).replace("[data]", "[data]\nsize = 4\nchannels = 1") + "\n")
    for step in steps:
        (folder / "checkpoints" / f"{step:08d}").mkdir(parents=True)
        (folder / "checkpoints" / f"{step:08d}" / "manifest.json").write_text(json.dumps({"step": step}))
    return folder


@pytest.fixture
def run(tmp_path):
    return make_drawable(tmp_path / "runs" / "a")


@pytest.fixture
def queue(monkeypatch):
    """A queue with the false worker; `queue.said` is what it has published."""
    said = []
    made = DrawingQueue(said.append, lambda: False, Worker(FAKE))
    made.said = said
    yield made
    made.close()


def submit(queue, run, image=b"", mask=b"", **settings):
    asked = read_request(run, settings, bool(image), bool(mask))
    return queue.submit(1, run.name, asked, Inputs(image, mask))


def wait(job, state="done", seconds=120):
    ended = {state, "done", "failed", "cancelled"}
    wait_until(lambda: job.state in ended, seconds)
    assert job.state == state, (job.state, job.error)
    return job


# History


def stored(number, **facts):
    return StoredDrawing(number, {"key": str(number), **facts}, np.full((2, 4, 4, 1), number, np.uint8))


def test_drawings_outlive_the_server_in_the_cache_and_the_oldest_go_first(tmp_path, monkeypatch):
    monkeypatch.setattr("unfog.serve.playground.drawing._MOST_FILES", 3)
    store = History(tmp_path)
    for n in range(1, 6):
        store.add(stored(n))
    monkeypatch.setattr("unfog.serve.playground.drawing._LARGEST", 40)
    store.add(StoredDrawing(9, {}, np.zeros((3, 4, 4, 1), np.uint8)))  # too large to be kept
    found = [(one.number, one.facts["key"], one.pictures.mean()) for one in History(tmp_path).read()]
    assert found == [(3, "3", 3), (4, "4", 4), (5, "5", 5)]
    assert list(History(tmp_path / "other").read()) == []
    (entry,) = [one for one in CacheEntry.all() if one.kind == "drawings of the page"]  # so `unfog cache` clears them
    assert not any(file.stat().st_mode & 0o077 for file in entry.path.iterdir())


DAMAGED = [b"", b"{}", b"[]\n", b'{"shape": [2, 4, 4, 1]}\nxx', b'{"shape": [9, 9, 9, 1]}\n' + zlib.compress(bytes(32))]
BOMB = b'{"shape": [1, 4000, 4000, 1]}\n' + zlib.compress(bytes(16_000_000))


@pytest.mark.parametrize("data", [*DAMAGED, BOMB])
def test_a_damaged_drawing_is_left_out(tmp_path, data):
    store = History(tmp_path)
    store.add(stored(1))
    (store._folder / "00000002.drawing").write_bytes(data)
    (store._folder / "00000003.drawing").symlink_to(store._folder / "00000001.drawing")
    assert [one.number for one in store.read()] == [1]


@pytest.mark.slow
def test_the_worker_leaves_when_nobody_draws(queue, run, monkeypatch):
    monkeypatch.setattr("unfog.serve.playground.queue._IDLE_SECONDS", 0.2)
    wait(submit(queue, run))
    wait_until(lambda: queue.said[-1] == {"job": 0})  # a page that names the process reads the list anew
    assert queue.worker.pid is None
    time.sleep(0.5)
    assert queue.said.count({"job": 0}) == 1, "a worker that has ended is not ended again"
    wait(submit(queue, run, seed=1))  # the next drawing starts another


# Protocol


def test_a_message_is_read_as_it_was_written():
    pipe = io.BytesIO()
    write_message(pipe, {"op": "draw", "job": 1}, b"\x00\xff" * 10)
    write_message(pipe, {"a": "ä"})
    pipe.seek(0)
    assert read_message(pipe) == ({"op": "draw", "job": 1}, b"\x00\xff" * 10)
    assert read_message(pipe) == ({"a": "ä"}, b"")
    assert read_message(pipe) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\x01\x00",
        b"\xff" * 8,
        b"\x05\x00\x00\x00\x00\x00\x00\x00{}",
        b"\x02\x00\x00\x00\x00\x00\x00\x00[]",
        b"\x02\x00\x00\x00\x00\x00\x00\x00{x",
        b"\x02\x00\x00\x00\x05\x00\x00\x00{}abc",
    ],
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(ProtocolError):
        read_message(io.BytesIO(data))


def test_a_message_that_is_too_long_is_not_written():
    with pytest.raises(ProtocolError, match="too long"):
        write_message(io.BytesIO(), {"text": "a" * 2**21})


# Requests


def test_without_a_checkpoint_the_newest_whole_one_is_drawn(run):
    (run / "checkpoints" / "00000030").mkdir()  # not whole: it has no manifest
    assert read_request(run, {}, False, False).checkpoint == 20
    assert read_request(run, {"checkpoint": 10}, False, False).checkpoint == 10
    with pytest.raises(RequestError, match="no whole checkpoint"):
        read_request(make_run(run.parent / "new"), {}, False, False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sampler": "os:system"}, "must be one of ddpm"),
        ({"sampler": "custom:mine"}, "must be one of ddpm"),
        ({"grid": "x.y:z"}, "must be one of schedule"),
        ({"device": "cuda"}, "not a setting of a drawing"),
        ({"image": "/etc/passwd"}, "not a setting of a drawing"),
        ({"out": "/tmp/x"}, "not a setting of a drawing"),
        ({"run": "/tmp/x"}, "not a setting of a drawing"),
        *(({"guide": guide}, "must be one of auto, none") for guide in ("/tmp/x", "3", 3, ["auto"])),
        ({"n": 65}, "at most 64"),
        ({"n": "many"}, "n ="),
        ({"steps": 100_000}, "at most 1000"),
        ({"checkpoint": -1}, "at least 0"),
        ({"levels": [0.5, 0.7], "steps": 3}, ""),
        ({"strength": 0.5}, "image to edit"),
        ({"guidance_interval": [0.9, 0.1]}, "interval"),
    ],
)
def test_what_the_page_may_not_ask_for(run, settings, said):
    if not said:
        assert read_request(run, settings, False, False).levels == (0.5, 0.7)  # refused where the run is known
        return
    with pytest.raises(RequestError, match=said):
        read_request(run, settings, False, False)


def test_the_command_and_the_python_draw_the_same(run):
    settings = {"n": 3, "seed": 5, "guidance": 1.5, "guidance_interval": [0.2, 0.8], "label": ["a b"], "ema": 0.1}
    settings |= {"guide": "auto", "checkpoint": 10, "strength": 0.5}
    asked = read_request(run, settings, True, True)
    words = shlex.split(command_of(asked))
    assert words[:2] == ["unfog", "sample"]
    assert from_words("sample", words[2:]) == asked
    assert settings_of(asked) == settings
    code = python_of(asked)
    compile(code, "snippet", "exec")
    assert "ema=0.1, step=10" in code
    assert "run.sample(3, seed=5" in code
    assert "image='image.png', mask='mask.png'" in code


def test_the_key_names_weights_settings_and_inputs(run):
    def key(body=b"", **settings):
        return key_of(read_request(run, settings, False, False), body)

    same = key(seed=1)
    assert key(seed=1, checkpoint=20) == same
    assert len({same, key(seed=2), key(seed=1, checkpoint=10), key(b"image", seed=1)}) == 4
    (run / "checkpoints" / "00000020" / "manifest.json").write_text('{"step": 20, "other": 1}')  # trained again
    assert key(seed=1) != same


# The queue


@pytest.mark.slow
def test_steps_and_pictures_arrive_and_what_was_drawn_is_not_drawn_again(queue, run):
    job = wait(submit(queue, run, n=5, steps=4))
    assert [step.share for step in job.steps.values()] == [1, 0.75, 0.5, 0.25]
    assert job.pictures.shape == (5, 4, 4, 1)
    assert (job.pictures == 200).all()
    pid = queue.worker.pid
    assert submit(queue, run, n=5, steps=4) is job
    assert wait(submit(queue, run, n=5, steps=4, seed=1)) is not job
    assert queue.worker.pid == pid
    states = [event["state"] for event in queue.said if event["job"] == job.id]
    assert states[:2] == ["waiting", "drawing"]
    assert states[-1] == "done"
    assert [event["done"] for event in queue.said if event["job"] == job.id and event["state"] == "drawing"][-1] == 4


@pytest.mark.slow
def test_a_drawing_is_cancelled_within_a_step(queue, run):
    job = submit(queue, run, n=1, steps=50, guidance=0.2)
    while len(job.steps) < 2:
        time.sleep(0.01)
    queue.cancel(job.id)
    seen = len(job.steps)
    wait(job, "cancelled")
    assert len(job.steps) <= seen + 2  # the step under way, and one that this process has not read yet
    assert job.pictures is None
    assert wait(submit(queue, run, n=1)).error == ""  # the same worker goes on
    assert submit(queue, run, n=1, steps=50, guidance=0.2) is not job  # what was cancelled may be drawn again


@pytest.mark.slow
def test_waiting_drawings_are_bounded_and_can_be_cancelled(queue, run):
    first = submit(queue, run, n=1, steps=100, guidance=0.3)
    while first.state == "waiting":
        time.sleep(0.01)
    waiting = [submit(queue, run, seed=seed) for seed in range(MOST_WAITING)]
    with pytest.raises(RequestError, match="wait already"):
        submit(queue, run, seed=99)
    queue.cancel(waiting[0].id)
    assert waiting[0].state == "cancelled"
    submit(queue, run, seed=99)
    for job in queue.list():
        queue.cancel(job.id)
    wait(first, "cancelled")


@pytest.mark.slow
def test_a_worker_that_is_killed_fails_its_drawing_and_no_other(queue, run):
    killed = wait(submit(queue, make_drawable(run.parent / "killed"), n=1), "failed")
    assert "by signal 9" in killed.error
    assert "next drawing starts another" in killed.error
    job = wait(submit(queue, run, n=1))
    pid = queue.worker.pid
    queue.worker.kill()
    assert queue.worker.pid is None
    assert submit(queue, run, n=1) is job
    wait(submit(queue, run, n=1, seed=2))
    assert queue.worker.pid not in (None, pid)


@pytest.mark.slow
def test_a_worker_whose_gpu_has_failed_is_replaced(queue, run):
    wait(submit(queue, run))
    pid = queue.worker.pid
    job = wait(submit(queue, make_drawable(run.parent / "broken"), n=1), "failed")
    assert "illegal memory access" in job.error
    assert queue.worker.pid is None
    wait(submit(queue, run, seed=1))
    assert queue.worker.pid not in (None, pid)


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_middle_is_no_hang(queue, run):
    job = submit(queue, run, n=1, steps=100, guidance=0.2)
    while not job.steps:
        time.sleep(0.01)
    queue.worker.kill()
    wait(job, "failed")
    wait(submit(queue, run, n=1, steps=2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [("garbage", "too long"), ("refused", "is refused"), ("silent", "not fit")])
def test_a_worker_that_fails_says_why(queue, run, name, said):
    assert said in wait(submit(queue, make_drawable(run.parent / name), n=1), "failed").error
    wait(submit(queue, run, n=1))


@pytest.mark.slow
def test_the_last_words_of_a_worker_are_waited_for(queue, run, monkeypatch):
    def listen_late(worker, process):
        time.sleep(0.3)
        listen(worker, process)

    listen = Worker._listen
    monkeypatch.setattr(Worker, "_listen", listen_late)
    assert "not fit" in wait(submit(queue, make_drawable(run.parent / "silent"), n=1), "failed").error


def test_a_worker_that_cannot_be_written_to_says_why():
    broken = Worker(("sh", "-c", "echo torch is not here >&2; exit 3"))
    with pytest.raises(RunError, match="torch is not here"):
        list(broken.work({"job": 1, "op": "draw"}, bytes(10**6), ("done",)))


@pytest.mark.slow
def test_a_checkpoint_that_the_run_deletes_is_replaced_by_its_newest(queue, run):
    asked = read_request(make_drawable(run.parent / "rotated"), {"n": 1}, False, False)
    job = wait(queue.submit(1, "rotated", asked, newest=True))
    assert job.request.checkpoint == 30
    assert queue.submit(1, "rotated", read_request(asked.run, {"n": 1}, False, False), newest=True) is job
    other = make_drawable(run.parent / "other" / "rotated")
    named = queue.submit(1, "rotated", read_request(other, {"n": 1, "checkpoint": 20}, False, False))
    assert "no such checkpoint" in wait(named, "failed").error  # one that was named is not replaced


def test_the_oldest_drawings_are_forgotten_first(queue, run, monkeypatch):
    monkeypatch.setattr("unfog.serve.playground.queue._KEPT_BYTES", 1000)
    drawn = [wait(submit(queue, run, n=4, seed=seed)) for seed in range(4)]
    wait_until(lambda: len(queue.list()) <= 2)
    assert drawn[-1] in queue.list()
    assert drawn[0] not in queue.list()
    assert submit(queue, run, n=4, seed=0) is not drawn[0]


@pytest.mark.slow
def test_a_worker_yields_to_a_run_that_trains(run):
    training = True
    queue = DrawingQueue(lambda _: None, lambda: training, Worker(FAKE))
    with contextlib.closing(queue):
        wait(submit(queue, run, n=1))
        assert queue.worker.nice == 10
        first, training = queue.worker.pid, False
        wait(submit(queue, run, n=1, seed=1))
        assert queue.worker.nice == 0
        assert queue.worker.pid != first  # priority cannot be raised again


# Pictures


def test_sheets_hold_pictures_in_rows_and_grey_for_those_that_are_missing():
    pictures = [np.full((2, 3, 1), value, np.uint8) for value in (10, 20, 30)]
    shown = np.asarray(Image.open(io.BytesIO(sheet([*pictures[:2], None, pictures[2]]))).convert("L"))
    assert shown.shape == (4, 6)
    assert shown[::2, ::3].tolist() == [[10, 20], [128, 30]]


def test_disagreement_is_bright_where_fillings_differ():
    pictures = np.zeros((4, 2, 2, 3), np.uint8)
    pictures[:2, 0, 0] = 200
    pictures[0, 1, 1] = 20
    found = disagreement(pictures)[..., 0]
    assert found[0, 0] == 255
    assert 0 < found[1, 1] < 60
    assert found[0, 1] == found[1, 0] == 0


def test_an_upload_is_brought_to_the_size_of_the_run():
    wide = np.zeros((8, 16, 3), np.uint8)
    wide[:, 4:12] = 250
    assert at_run_size(wide, ImageFormat(1, 4, 4)).shape == (4, 4, 1)
    assert (at_run_size(wide, ImageFormat(3, 4, 4)) > 230).all()  # the centre alone, but for what resizing blends in
    mask = np.where(np.arange(16).reshape(4, 4, 1) % 3 == 0, 255, 0).astype(np.uint8)
    assert (at_run_size(np.repeat(mask, 3, 2), ImageFormat(1, 4, 4)) == mask).all()  # to the pixel


# Uploads


def test_settings_travel_inside_a_png_and_are_read_back():
    about = {"unfog": "0.2", "run": "a", "picture": 2, "settings": {"seed": 3}, "other": "left out"}
    number, upload = Uploads().add(png(np.zeros((4, 4, 3), np.uint8), Unfog=json.dumps(about)))
    assert number == 1
    assert upload.settings == {name: about[name] for name in ("unfog", "run", "picture", "settings")}


@pytest.mark.parametrize("text", ["[" * 10_000, "no json", "[]", '{"settings": 3}', "1" * 2**17])
def test_hostile_text_in_a_png_is_no_settings(text):
    upload = Uploads().add(png(np.zeros((4, 4, 3), np.uint8), Unfog=text))[1]
    assert upload.settings is None
    assert upload.pixels.shape == (4, 4, 3)


@pytest.mark.parametrize("name", CONTENTS)
def test_a_hostile_upload_is_refused_in_a_sentence(name):
    with pytest.raises(RequestError, match="the upload"):
        Uploads().add(CONTENTS[name])


def test_old_uploads_are_forgotten():
    uploads, picture = Uploads(), png(np.zeros((1, 1), np.uint8))
    numbers = [uploads.add(picture)[0] for _ in range(30)]
    assert uploads[numbers[-1]].pixels.shape == (1, 1, 3)
    with pytest.raises(RequestError, match="upload the picture again"):
        uploads[numbers[0]]


# Votes


def test_wilson_interval():
    # 10 of 20: (0.299, 0.701); 0 of 10: (0, 0.278) (Brown, Cai and DasGupta 2001).
    assert blind_comparison._wilson_interval(10, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)
    assert blind_comparison._wilson_interval(0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert blind_comparison._wilson_interval(0, 0) == (0, 1)


def test_votes_are_kept_in_the_run_and_counted_whatever_the_order(run):
    old, new = (read_request(run, {"checkpoint": step, "seed": 3}, False, False) for step in (10, 20))
    blind_comparison.add_vote(run, old, new, 0, "second")
    blind_comparison.add_vote(run, new, old, 1, "first")
    blind_comparison.add_vote(run, old, new, 2, "neither")
    blind_comparison.add_vote(run, old, new, 3, "second")
    (found,) = blind_comparison.add_vote(run, old, new, 3, "first")  # changed one's mind
    assert (found["first"], found["second"]) == ({"checkpoint": 10}, {"checkpoint": 20})
    assert (found["first_wins"], found["second_wins"], found["ties"]) == (1, 2, 1)
    assert found["interval"] == [round(one, 4) for one in blind_comparison._wilson_interval(1, 3)]
    with (run / "blind-comparisons.jsonl").open("ab") as file:
        file.write(b'{"torn\n[1]\n' + b"[" * 100_000 + b"\n")
    assert blind_comparison.tallies(run) == [found]


def test_votes_that_mean_nothing_are_refused(run):
    old, new = (read_request(run, {"checkpoint": step}, False, False) for step in (10, 20))
    for sides, choice in (((old, old), "first"), ((old, new), "left")):
        with pytest.raises(RequestError):
            blind_comparison.add_vote(run, *sides, 0, choice)
    with pytest.raises(RequestError, match="same noise"):
        blind_comparison.add_vote(run, old, read_request(run, {"checkpoint": 20, "seed": 1}, False, False), 0, "first")
    (run / "blind-comparisons.jsonl").symlink_to(run.parent / "elsewhere")
    with pytest.raises(OSError, match="link"):
        blind_comparison.add_vote(run, old, new, 0, "first")
    assert not (run.parent / "elsewhere").exists()


# Routes


@pytest.fixture
def client(run, monkeypatch):
    monkeypatch.setattr("unfog.serve.playground.queue.Worker", lambda: Worker(FAKE))
    server = Server(run.parent)
    yield TestClient(build_app(server, drawing_routes.playground_routes(server)), raise_server_exceptions=False)
    server.close()


def number(client, name="a"):
    return next(row["id"] for row in client.get("/api/runs").json() if row["name"] == name)


def drawn(client, **body):
    answer = client.post("/api/draw", json={"run": number(client), **body})
    assert answer.status_code == 200, answer.text
    path = f"/api/draw/{answer.json()['job']}"
    wait_until(lambda: client.get(path).json()["state"] in ("done", "failed"))
    return client.get(path).json()


def pixels(answer):
    assert answer.status_code == 200, answer.text
    return np.asarray(Image.open(io.BytesIO(answer.content)).convert("L"))


@pytest.mark.slow
def test_a_restarted_server_shows_what_was_drawn_and_does_not_draw_it_again(client, run):
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    job = drawn(client, settings={"n": 2, "seed": 5})
    pictures = pixels(client.get(f"/api/draw/{job['job']}/pictures.webp"))
    wait_until(lambda: list(History(run.parent).read()))  # it is stored after it was published
    server = Server(run.parent)
    again = TestClient(build_app(server, drawing_routes.playground_routes(server)), raise_server_exceptions=False)
    (listed,) = again.get("/api/draw").json()["jobs"]
    assert (listed["job"], listed["state"], listed["settings"]["seed"]) == (job["job"], "done", 5)
    assert (pixels(again.get(f"/api/draw/{job['job']}/pictures.webp")) == pictures).all()
    assert again.get("/api/draw").json()["worker"]["pid"] is None
    assert drawn(again, settings={"n": 2, "seed": 5})["job"] == job["job"]
    assert again.get("/api/draw").json()["worker"]["pid"] is None  # it was not drawn again
    assert drawn(again, settings={"n": 2, "seed": 6})["job"] == job["job"] + 1
    server.close()
    assert files == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def sent(client, pixels):
    upload = {"content": png(pixels), "headers": {"content-type": "image/png"}}
    return client.post("/api/upload", **upload).json()["upload"]


def test_an_upload_is_decoded_once_in_the_thread_of_pictures(client, monkeypatch):
    threads = []

    def decode(*args):
        threads.append(threading.current_thread().name)
        return decode_picture(*args)

    monkeypatch.setattr("unfog.serve.playground.images.decode_picture", decode)
    picture = {"content": png(np.zeros((3, 5), np.uint8)), "headers": {"content-type": "image/png"}}
    answer = client.post("/api/upload", **picture).json()
    assert (answer["width"], answer["height"]) == (5, 3)
    assert [name.partition("_")[0] for name in threads] == ["pictures"]


@pytest.mark.slow
def test_pictures_of_conditions_are_kept_with_the_drawing_also_by_another_server(client, run):
    column = '[[columns]]\nname = "mask"\nkind = "mask"\ncategories = ["0", "7"]\nstatistics = [1.0, 4.0, 4.0]\n'
    (run / "config.toml").write_text((run / "config.toml").read_text() + column)
    labels = np.array([[0, 7], [7, 0]], np.uint8).repeat(2, 0).repeat(2, 1)
    upload = sent(client, labels)
    view = client.get(f"/api/upload/{upload}.png?run={number(client)}&given=mask")
    assert pixels(view).shape == (4, 4)
    for named, status in ((f"{upload}.png?run={number(client)}&given=other", 400), ("99.png?run=1&given=mask", 400)):
        assert client.get(f"/api/upload/{named}").status_code == status
    job = drawn(client, settings={"n": 1}, pictures={"mask": {"upload": upload}})
    assert job["given_pictures"] == ["mask"]
    assert "--given mask=mask.png" in job["command"]
    assert drawn(client, settings={"n": 1})["job"] != job["job"]
    painted = sent(client, (labels > 0).astype(np.uint8))  # numbers of the labels, as the brush sends them
    of = [{"upload": painted, "painted": True}, {"upload": painted, "painted": True}, {"job": job["job"] + 2}]
    assert {drawn(client, settings={"n": 1}, pictures={"mask": one})["job"] for one in of} == {job["job"] + 2}
    wait_until(lambda: len(list(History(run.parent).read())) == 3)
    server = Server(run.parent)
    again = TestClient(build_app(server, drawing_routes.playground_routes(server)), raise_server_exceptions=False)
    assert drawn(again, settings={"n": 1}, pictures={"mask": {"job": job["job"]}})["job"] == job["job"]
    for wrong, said in {
        "x": "must be an object",
        ("mask",): "is {",
        ("other",): "is not a condition that is an image; give one of mask",
    }.items():
        body = wrong if wrong == "x" else {wrong[0]: "/etc/passwd"}
        answer = again.post("/api/draw", json={"run": number(again), "settings": {"n": 1}, "pictures": body})
        assert answer.status_code == 400
        assert said in answer.json()["error"]
    server.close()


@pytest.mark.slow
def test_a_drawing_through_the_routes(client, run):
    job = drawn(client, settings={"n": 2, "steps": 3})
    assert job["state"] == "done"
    assert [step["number"] for step in job["kept_steps"]] == [0, 1, 2]
    assert job["command"] == f"unfog sample {run} -n 2 --steps 3 --checkpoint 20"
    path = f"/api/draw/{job['job']}"
    assert (pixels(client.get(f"{path}/steps/1.webp?what=x0")) == 1).all()
    assert pixels(client.get(f"{path}/steps/1.webp?what=x0")).shape == (4, 8)
    assert (pixels(client.get(f"{path}/pictures.webp")) == 200).all()
    assert (pixels(client.get(f"{path}/disagreement.webp")) == 0).all()
    saved = client.get(f"{path}/1.png")
    assert saved.headers["content-disposition"].startswith("attachment")
    assert (pixels(saved) == 200).all()
    answer = client.post("/api/upload", content=saved.content, headers={"content-type": "image/png"}).json()
    assert answer["settings"]["settings"] == {"n": 2, "steps": 3, "checkpoint": 20}
    assert answer["settings"]["run"] == "a"
    listed = client.get("/api/draw").json()
    assert [one["job"] for one in listed["jobs"]] == [job["job"]]
    assert listed["worker"]["pid"]
    assert client.post("/api/worker/stop", json={}).json() == {"stopped": True}
    assert client.get("/api/draw").json()["worker"]["pid"] is None


@pytest.mark.slow
def test_an_edit_takes_an_upload_or_a_picture_that_was_drawn(client):
    upload = {"content": png(np.zeros((8, 8, 3), np.uint8)), "headers": {"content-type": "image/png"}}
    image, mask = (client.post("/api/upload", **upload).json()["upload"] for _ in range(2))
    job = drawn(client, settings={"n": 1}, image={"upload": image}, mask={"upload": mask})
    assert job["edit"] == {"image": True, "mask": True}
    assert "--image image.png --mask mask.png" in job["command"]
    other = drawn(client, settings={"n": 1, "strength": 0.5}, image={"job": job["job"], "picture": 0})
    assert other["edit"] == {"image": True, "mask": False}
    shown = client.get(f"/api/upload/{image}.png?run={number(client)}")
    assert pixels(shown).shape == (4, 4)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"run": 12345}, 404),
        ({"run": "../../etc"}, 404),
        ({"run": [1]}, 404),
        ({"settings": []}, 400),
        ({"settings": {"sampler": "os:system"}}, 400),
        ({"image": "/etc/passwd"}, 400),
        ({"image": {"upload": 77}}, 400),
        ({"image": {"job": 1, "picture": 0}}, 404),
        ({"mask": {"upload": 1}}, 400),
    ],
)
def test_what_cannot_be_drawn_is_said_in_a_sentence(client, body, status):
    answer = client.post("/api/draw", json={"run": number(client), **body})
    assert answer.status_code == status
    assert len(answer.json()["error"]) > 10


@pytest.mark.slow
def test_what_is_not_there_is_404(client):
    job = drawn(client, settings={"n": 1})["job"]
    for path in ("draw/99", f"draw/{job}/7.png", f"draw/{job}/nearest.webp", "draw/99/pictures.webp"):
        assert client.get(f"/api/{path}").status_code == 404, path


@pytest.mark.slow
def test_blind_votes_through_the_routes(client):
    jobs_ = [drawn(client, settings={"n": 2, "checkpoint": step})["job"] for step in (10, 20)]
    body = {"first": jobs_[0], "second": jobs_[1], "picture": 1, "choice": "second"}
    (found,) = client.post("/api/blind", json=body).json()
    assert found["second_wins"] == 1
    assert client.get(f"/api/blind?run={number(client)}").json() == [found]
    assert client.post("/api/blind", json={**body, "picture": 9}).status_code == 404


@pytest.mark.slow
def test_the_server_imports_no_torch():
    code = "import sys, unfog.serve.playground.drawing_routes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
