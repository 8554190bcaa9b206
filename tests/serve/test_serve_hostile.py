"""Runs of strangers and made-up addresses: every answer is a sentence, takes a bounded time, and holds up no other."""

import json
import random
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("orjson")
pytest.importorskip("starlette")

import unfog.serve
from hostile import places
from served import make_run
from unfog.serve import run_files
from unfog.serve.playground.drawing_routes import playground_routes
from unfog.serve.run_routes import build_app
from unfog.serve.server import Server

with warnings.catch_warnings():  # which client it uses is nothing to us
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

EVALUATION = {"step": 4, "verdict": "x", "drawn": {"steps": 3}, "copies": [{"by": "x", "picture": "a.png"}]}
EVALUATION |= {"measured": [{"metric": "kid", "value": 1.0, "low": 0.5, "n": 3, "features": "x", "note": "n"}]}
VOTE = {"first": {"ema": 0.1}, "second": {"ema": 0.2}, "seed": 0, "picture": 1, "choice": "first"}
FILES = {
    "evaluations/1.json": EVALUATION,
    "blind-comparisons.jsonl": VOTE,
    "heartbeat.json": {"time": "2026-11-24T07:00:00+00:00", "pid": 1, "host": "h", "step": 4, "doing": "x", "next": 5},
    "data.json": {"found": 4, "class_counts": {"a": 3}, "files": [{"name": "a", "status": "skipped", "reason": "x"}]},
    "events.jsonl": {"time": "t", "step": 2, "kind": "disk_full", "reason": "x", "needed": 3, "free": 4},
    "metrics.jsonl": {"step": 1, "images": 8, "loss": 1.0, "loss_by_level": [1, 2]},
    "checkpoints/00000004/manifest.json": {"step": 4, "chosen_by": "kid", "value": 1.0, "files": {"a": [1, "b"]}},
}
ODD = ["null", "[]", "{}", '"x"', "1e400", "-1e400", "-1", "NaN", "true", "1" + "0" * 400, "1" + "0" * 4290]
ODD += ["1" + "0" * 5000, "[" * 3000 + "]" * 3000, '"\\ud800"', '{"\\ud800": 1}', "1e99", '"\\u0000"']
SETTINGS = ["inf", "-inf", "nan", "1" + "0" * 400, "[inf]", "{a = nan}", "''", "-1", "1979-05-27", "true"]
NUMBERS = ["9" * 5000, "9" * 400, "9" * 15, "0", "-1", "x", "1e5", "%00", "%D9%A3"]


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "runs" / "a", rows=3)


@pytest.fixture
def server(run):
    return Server(run.parent)


@pytest.fixture
def client(server):
    # What no handler answers is raised here.
    with TestClient(build_app(server, playground_routes(server))) as client:
        yield client


def with_odd(value, at, odd):
    """JSON of a value in which the part of that key is replaced by a text."""
    if not at:
        return odd
    if isinstance(value, list):
        return (
            "["
            + ",".join(with_odd(one, at[1:], odd) if i == at[0] else json.dumps(one) for i, one in enumerate(value))
            + "]"
        )
    parts = [
        f"{json.dumps(key)}: {with_odd(one, at[1:], odd) if key == at[0] else json.dumps(one)}"
        for key, one in value.items()
    ]
    return "{" + ",".join(parts) + "}"


def hostile_files(run):
    """(name, content) of files of a run in which one value is another than anybody would write."""
    for name, usual in FILES.items():
        for at in places(usual):
            yield from ((name, with_odd(usual, at, odd) + "\n") for odd in ODD)
    lines = (run / "config.toml").read_text().splitlines()
    for i, line in enumerate(lines):
        if " = " in line:
            for odd in SETTINGS:
                yield "config.toml", "\n".join([*lines[:i], line.split(" = ")[0] + " = " + odd, *lines[i + 1 :]])


def check_hostile_files(server, client, run, files):
    number = client.get("/api/runs").json()[0]["id"]
    picture = (run / "samples" / "00000010.png").read_bytes()
    upload = client.post("/api/upload", content=picture, headers={"content-type": "image/png"}).json()["upload"]
    detail = f"/api/runs/{number}"
    asked = {
        "blind-comparisons.jsonl": [f"/api/blind?run={number}"],
        "config.toml": [detail, f"/api/upload/{upload}.png?run={number}"],
        "metrics.jsonl": [detail, f"{detail}/metrics", f"{detail}/thinned?points=1"],
        "events.jsonl": [detail, f"{detail}/events"],
    }
    for name, content in files:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_bytes() if path.exists() else b""
        path.write_text(content)
        server.tick(everything=True)
        assert client.get("/api/runs").json()[0]["state"] != "unreadable", content[:200]
        for address in asked.get(name, [detail]):
            status = client.get(address).status_code
            # A size that is none is refused in a sentence. No part of the page fails for one value.
            assert status == 200 or (status == 400 and "upload" in address), (name, address, status, content[:200])
        path.write_bytes(before)


@pytest.mark.slow
def test_a_value_that_nobody_writes_is_shown_or_left_out(server, client, run):
    named = [
        ("evaluations/1.json", with_odd(EVALUATION, ("step",), "1e400")),
        ("blind-comparisons.jsonl", with_odd(VOTE, ("first", "ema"), "NaN") + "\n"),
        ("blind-comparisons.jsonl", with_odd(VOTE, ("first", "ema"), '"\\ud800"') + "\n"),
        ("config.toml", "[data]\nsize = inf\nchannels = nan\n"),
        ("config.toml", "[data]\nsize = 1000000000\nchannels = 3\n"),
    ]
    check_hostile_files(server, client, run, named + random.Random(0).sample(list(hostile_files(run)), 60))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_value_that_nobody_writes_is_shown_or_left_out(server, client, run):
    check_hostile_files(server, client, run, hostile_files(run))


@pytest.mark.slow
def test_any_number_in_an_address_has_an_answer(client):
    number = client.get("/api/runs").json()[0]["id"]
    routes = [route for route in client.app.routes if route.path != "/api/stream"]
    assert len(routes) > 30
    for route in routes:
        for value in NUMBERS if "{" in route.path else ():
            runs = (value, str(number)) if "{run:number}" in route.path else (value,)
            for path in {re.sub(r"\{\w+:\w+\}", value, route.path.replace("{run:number}", run)) for run in runs}:
                status = client.request(max(route.methods), path, content="{}").status_code
                assert status < 500, (path[:80], status)
    for address in (
        "blind",
        "upload/1.png",
        f"runs/{number}/metrics",
        f"runs/{number}/thinned",
        f"runs/{number}/events",
    ):
        for name in ("run", "from", "points", "low"):
            for value in (*NUMBERS, "", "inf", "nan"):
                answer = client.get(f"/api/{address}?{name}={value}")
                assert answer.status_code < 500
                if answer.status_code >= 400:
                    assert len(answer.json()["error"]) < 300


def test_no_route_reads_a_number_or_writes_json_in_a_way_of_its_own():
    for path in Path(unfog.serve.__path__[0]).rglob("*.py"):
        text = path.read_text()
        assert not re.search(r":int\}|int\(request", text), f"{path.name}: {{NAME:number}}, or whole_number"
        if path.name != "server.py":
            assert "JSONResponse" not in text, f"{path.name}: Json takes whatever a run holds"


def save_png(path, width, height):
    Image.fromarray(np.zeros((height, width), np.uint8)).save(path)


@pytest.mark.slow
def test_a_picture_that_cannot_be_shown_is_said_in_a_sentence(client, run):
    number = client.get("/api/runs").json()[0]["id"]
    samples = run / "samples"
    save_png(samples / "00000001.png", 17_000, 1)
    save_png(samples / "00000002.png", 9_000, 9_000)
    with (samples / "00000003.png").open("wb") as file:
        file.truncate(2**26 + 1)
    Image.new("L", (2, 2)).save(samples / "00000004.png", "PPM")
    (samples / "00000005.png").write_bytes(b"")
    (samples / "00000006.png").mkdir()
    said = ["over 16,383 pixels", "megapixels", "over 64 MB", "not a PNG", "not a PNG"]
    for step, words in enumerate(said, 1):
        answer = client.get(f"/api/runs/{number}/preview/{step}.webp")
        assert (answer.status_code, words in answer.json()["error"]) == (400, True), answer.text
    assert client.get(f"/api/runs/{number}/preview/6.webp").status_code in (400, 422)
    assert client.get(f"/api/runs/{number}/preview/10.webp").status_code == 200


@pytest.mark.slow
def test_no_answer_waits_for_pictures_or_for_the_record_of_another_run(server, client, run, monkeypatch):
    number, other = client.get("/api/runs").json()[0]["id"], make_run(run.parent / "b", rows=3)
    server.runs.scan()
    other = next(one.id for one in server.runs if one.path == other)
    go_on = threading.Event()
    encode = run_files._encode_webp
    monkeypatch.setattr(run_files, "_encode_webp", lambda *asked: go_on.wait(60) and encode(*asked))
    for step in range(30, 45):
        save_png(run / "samples" / f"{step:08d}.png", 4, 4)
    with ThreadPoolExecutor(40) as pages, server.runs[number].lock:
        pictures = [pages.submit(client.get, f"/api/runs/{number}/preview/{step}.webp") for step in range(30, 45)]
        records = [pages.submit(client.get, f"/api/runs/{number}/metrics") for _ in range(15)]
        for address in ("runs", "state", f"runs/{other}", f"runs/{other}/metrics", "tasks", "settings"):
            assert pages.submit(client.get, f"/api/{address}").result(30).status_code == 200
        assert not any(one.done() for one in (*pictures, *records))
        go_on.set()
        assert {one.result(30).status_code for one in pictures} == {200}
        server.runs[number].lock.release()
        assert {one.result(30).status_code for one in records} == {200}
        server.runs[number].lock.acquire()
