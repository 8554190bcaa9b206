"""The buttons of the page: requests to a run that trains, commands with their checks, and child processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

pytest.importorskip("orjson")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import forked
from conftest import TRANSFORMER, few_images, without_clock
from forked import Forked
from served import make_run, serving
from unfog.config.requests.train import ResumeRequest, TrainRequest
from unfog.errors import RequestError
from unfog.process.heartbeat import Heartbeat
from unfog.serve import controls
from unfog.serve.child_processes import ChildProcesses
from unfog.serve.controls import form_fields, page_settings
from unfog.serve.run_detail import read_findings
from unfog.serve.runs import number_of
from unfog.serve.server import Server
from waiting import wait_until


@pytest.fixture
def server(tmp_path):
    make_run(tmp_path / "runs" / "a")
    return Server(tmp_path / "runs", (few_images(),))


def body(server, source="fashion", **settings):
    found = {text: number for number, text in controls.SourceList(server).texts().items()}
    return {"source": found[source], "settings": {name.replace("__", "."): value for name, value in settings.items()}}


def test_a_form_becomes_the_command_that_a_person_would_type(server):
    command = controls.train_command(
        server,
        body(server, data__size="16", optimizer__lr="0.001", data__flip=True, optimizer__betas="0.9 0.99"),
    )
    out = server.folder / "fashion"
    assert command.text == f"unfog train fashion --size=16 --lr=0.001 --flip --optimizer.betas=0.9 0.99 --out {out}"
    assert command.trains
    (run,) = server.runs
    assert command.new_run == number_of("fashion") != run.id  # as the list will name it
    told = controls.train_command(server, body(server, data__condition="age,stain:category,degrade:factor=2"))
    assert "--condition=age,stain:category,degrade:factor=2" in told.words
    off = controls.train_command(server, body(server, data__flip="off"))
    assert "--no-flip" in off.words


@pytest.mark.parametrize(
    ("word", "setting"),
    [
        ("prompt", "data.condition"),
        ("square", "data.aspect"),
        ("grad clip", "training.clip"),
        ("vram", "training.microbatch"),
    ],
)
def test_a_form_knows_the_words_that_explain_knows(word, setting):
    assert setting in [field["name"] for field in form_fields("train") if word in field["words"]]


def test_sources_are_the_built_in_one_those_of_the_command_line_and_those_of_runs(server, tmp_path):
    make_run(tmp_path / "runs" / "b")
    config = tmp_path / "runs" / "b" / "config.toml"
    config.write_text(config.read_text().replace('"fashion"', '"https://me:word@example.org/x.tar?sign=1"'))
    server.runs.scan()
    names = [one["name"] for one in controls.SourceList(server).as_json()]
    # The page selects the first, which is what the person gave.
    assert names == [few_images(), "fashion", "https://example.org/x.tar"]


def test_a_folder_of_the_command_line_is_listed_once_if_a_run_stands_on_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "b")
    config = tmp_path / "runs" / "b" / "config.toml"
    config.write_text(config.read_text().replace('"fashion"', f'"{tmp_path / "photos"}"'))
    names = [one["name"] for one in controls.SourceList(Server(tmp_path / "runs", ("photos/",))).as_json()]
    assert names == ["photos/", "fashion"]


def test_a_run_may_be_given_a_name_that_is_no_path(server):
    command = controls.train_command(server, body(server) | {"name": "bags-2.b"})
    assert (command.words[-1], command.new_run) == (str(server.folder / "bags-2.b"), number_of("bags-2.b"))
    for name in ("../x", "a/b", ".hidden", "-n", "a b", "a\n", "x" * 61, "ä", 3, ["a"], "a\\b", "c:d"):
        with pytest.raises(RequestError, match="name of a run"):
            controls.train_command(server, body(server) | {"name": name})
    with pytest.raises(RequestError, match="already"):
        controls.train_command(server, body(server) | {"name": "a"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer.lr": "-1"}, "must be"),
        ({"optimizer.lr": "fast"}, "not a number"),
        ({"training.batch": "-1"}, "batch"),
        ({"training.steps": "10", "training.images": "10"}, "given 2 times"),
        ({"training.precision": "fp8"}, "fp8"),
        ({"nothing": "1"}, "not a setting"),
        ({"data.condition": "mask=/etc"}, "names files; here it is columns"),
        ({"data.condition": "age,mask=hf:somebody/masks:mask"}, "names files"),
        ({"data.condition": "/etc/t.csv:age"}, "names files"),
        ({"data.condition": "../t.csv:age,degrade:factor=2"}, "names files"),
        ("x", "must be an object"),
    ],
)
def test_settings_are_checked_by_the_rules_of_the_command_line(server, settings, message):
    with pytest.raises(RequestError, match=message):
        controls.train_command(server, body(server) | {"settings": settings})
    assert server.tasks.list() == []


def test_a_resume_follows_the_rules_of_resumes(server):
    (run,) = server.runs
    assert controls.resume_command(run, {"settings": {"training.steps": "900"}}).words[-1] == "--steps=900"
    with pytest.raises(RequestError, match="cannot become"):
        controls.resume_command(run, {"settings": {"data.size": "64"}})
    with pytest.raises(RequestError, match="--force"):
        controls.resume_command(run, {"settings": {"training.seed": "7"}})


def test_a_run_that_names_code_is_resumed_only_with_consent_and_never_imported_here(server, monkeypatch):
    """Checking its settings could import what they name, which is left to the child."""
    (run,) = server.runs
    text = (run.path / "config.toml").read_text()
    (run.path / "config.toml").write_text(text.replace('source = "fashion"', 'source = "python:evil:x"'))
    for button in (lambda: controls.resume_command(run, {}), lambda: controls.doctor_command(server, run, {})):
        monkeypatch.delenv("UNFOG_TRUST", raising=False)
        with pytest.raises(RequestError, match="set UNFOG_TRUST=evil:x"):
            button()
        monkeypatch.setenv("UNFOG_TRUST", "evil:x")
        assert button().words[0] in ("resume", "doctor")
    assert "evil" not in sys.modules


def test_forms_list_the_settings_with_their_rules():
    fields = form_fields("train")
    names = [field["name"] for field in fields]
    assert names[0] == "data.size"
    assert [field["common"] for field in fields] == sorted((field["common"] for field in fields), reverse=True)
    lr = next(field for field in fields if field["name"] == "optimizer.lr")
    assert (lr["type"], lr["at_least"], lr["group"], lr["resume"]) == ("number", 0, "optimizer", "free")
    assert "fp32" in next(field["choices"] for field in fields if field["name"] == "training.precision")
    assert not {"source", "out", "config", "init.folder", "autoencoder_folder", "log.sinks"} & set(names)
    resume = {field["name"]: field for field in form_fields("resume")}
    assert "data.size" not in resume
    assert resume["training.steps"]["common"]
    assert not resume["training.seed"]["common"]  # it changes what the run computes: behind the search
    assert {each.setting for each in page_settings(ResumeRequest)} <= {
        each.setting for each in page_settings(TrainRequest)
    }


REMEDY = "a lower learning rate: unfog resume {} --lr 0.0005 --steps 80, or train again with it"


def test_the_remedy_of_a_finding_is_a_button(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (run,) = server.runs
    findings = [{"code": "run.loss", "severity": "warning", "evidence": "it rises", "remedy": REMEDY.format(run.path)}]
    findings += [{"code": "run.x", "severity": "hint", "evidence": "e", "remedy": "unfog resume a --out /tmp/x --lr 1"}]
    for name, title in (("a", f"Checks of {run.path}"), ("a-2", "Checks of another")):
        (tmp_path / "doctor" / name).mkdir(parents=True)
        text = json.dumps({"title": title, "findings": findings if name == "a" else []})
        (tmp_path / "doctor" / name / "findings.json").write_text(text)
    loss, other = read_findings(run.path, None)
    assert (loss["id"], loss["text"]) == ("run.loss", "it rises")
    assert loss["command"] == f"unfog resume {run.path} --lr=0.0005 --steps=80"
    assert other["command"] is None  # the page may not give --out
    settings = controls.remedy_settings(loss["remedy"])
    assert controls.resume_command(run, {"settings": settings}).text == loss["command"]


def test_nobody_is_asked_where_nothing_runs(server):
    (run,) = server.runs
    for what in ("save", "preview", "stop"):
        with pytest.raises(RequestError, match="is not running"):
            controls.send_request(run, what)
    for what in ("../x", None, "SAVE", 1):
        with pytest.raises(RequestError, match="asked for"):
            controls.send_request(run, what)
    assert not [name for name in os.listdir(run.path) if name.isupper()]


def test_a_request_that_cannot_be_written_is_answered(server):
    (run,) = server.runs
    now = datetime.now(UTC).isoformat()
    beat = {"time": now, "pid": os.getpid(), "host": socket.gethostname(), "next": 5, "doing": "training"}
    (run.path / "heartbeat.json").write_text(json.dumps(beat))
    (run.path / "SAVE").mkdir()
    with pytest.raises(RequestError, match="cannot be written: "):
        controls.send_request(run, "save")
    assert controls.send_request(run, "stop") == {"command": f"touch {run.path / 'STOP'}"}
    assert (run.path / "STOP").exists()


def test_a_request_that_is_a_link_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "target").write_text("kept")
    (tmp_path / "run").mkdir()
    os.symlink(tmp_path / "target", tmp_path / "run" / "SAVE")
    Heartbeat.request(tmp_path / "run", "SAVE")
    assert (tmp_path / "target").read_text() == "kept"
    assert not (tmp_path / "run" / "SAVE").is_symlink()


START = subprocess.Popen


def quick_child(monkeypatch, code):
    """Let tasks run this code instead of unfog."""
    monkeypatch.setattr(subprocess, "Popen", lambda words, **more: START([sys.executable, "-c", code], **more))


@pytest.mark.slow
def test_output_of_a_child_is_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr("unfog.serve.child_processes._MOST_BYTES", 10**6)
    quick_child(monkeypatch, "print('x' * 3_000_000); input()")
    published = []
    tasks = ChildProcesses(published.append)
    task = tasks.start(["plan", "a"], outlives=False)
    wait_until(lambda: task.status is not None)
    assert task.text().endswith("EOFError: EOF when reading a line\n")
    assert len(task.text()) == 2**16
    tasks.tick()
    assert task.size() == 0
    assert published[0]["running"]
    assert published[-1] == {"id": 1, "command": "unfog plan a", "run": None, "running": False, "status": 1}


def test_too_many_children_are_refused_and_old_ones_forgotten(monkeypatch):
    monkeypatch.setattr("unfog.serve.child_processes._MOST_RUNNING", 2)
    monkeypatch.setattr("unfog.serve.child_processes._MOST_KEPT", 3)
    quick_child(monkeypatch, "import time; time.sleep(60)")
    tasks = ChildProcesses(lambda task: None)
    for _ in range(2):
        tasks.start(["plan"], outlives=False)
    with pytest.raises(RequestError, match="wait for one"):
        tasks.start(["plan"], outlives=False)
    tasks[1].stop()
    wait_until(lambda: tasks[1].status is not None)
    tasks.close()
    assert all(task.status is not None for task in tasks.list())
    quick_child(monkeypatch, "")
    for _ in range(4):
        tasks.start(["plan"], outlives=False)
        wait_until(lambda: all(task.status is not None for task in tasks.list()))
    assert len(tasks.list()) <= 3


SMALL = ["--size", "8", "--network", TRANSFORMER, "--device", "cpu", "--batch", "8", "--lr", "1e-3"]
SMALL += ["--precision", "fp32"]
SMALL += ["--sampler.steps", "2", "--preview.images", "2", "--evaluate.images", "4", "--evaluate.levels", "2"]
SMALL += ["--log.every", "5", "--checkpoint.every", "20", "--preview.every", "1000", "--evaluate.every", "20"]


def digest(run: Path) -> dict[str, bytes]:
    """The newest checkpoint of a run, byte for byte; its manifest and config name the run's own settings alike."""
    newest = max((run / "checkpoints").iterdir())
    names = ("model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json")
    return {name: (newest / name).read_bytes() for name in names} | {"step": newest.name.encode()}


def train_words(out: Path, steps: int) -> list[str]:
    return ["train", few_images(), *SMALL, "--steps", str(steps), "--out", str(out)]


# Step 80 waits for a request: however fast or busy the machine, a preview is asked for before the last step.
WAITS_TO_BE_ASKED = """
import sys, time
from unfog.cli.main import main
from unfog.runs.session import Session

def wait(session, step, ended=Session.on_step_end):
    ended(session, step)
    until = time.monotonic() + 120
    while step == 80 and not session.preview_requested() and time.monotonic() < until:
        time.sleep(0.01)

Session.on_step_end = wait
sys.argv[0] = "unfog"
main()
"""


def train_watched(run: Path, steps: int) -> int:
    """Train while a page reads all that it has to offer, and asks for checkpoints and previews; return how many."""
    run.parent.mkdir()
    with (
        serving(run.parent, XDG_CONFIG_HOME=str(run.parent)) as (web, _),
        Forked(train_words(run, steps), WAITS_TO_BE_ASKED, subprocess.DEVNULL, subprocess.DEVNULL) as training,
    ):
        wait_until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size)
        (row,) = wait_until(lambda: web.get("api/runs"))
        requests, last = 0, 0.0
        while training.poll() is None:
            web.get(f"api/runs/{row['id']}")
            web.send("GET", f"api/runs/{row['id']}/metrics?from=0")
            if time.monotonic() - last > 1:
                last = time.monotonic()
                for what in ("preview", "save"):
                    status, answer = web.post(f"api/runs/{row['id']}/ask", {"what": what})
                    if status == 200:
                        requests += what == "preview"
                        assert answer["command"] == f"touch {run / what.upper()}"
            time.sleep(0.05)
        assert training.returncode == 0
    return requests


@pytest.mark.slow
def test_a_run_that_is_watched_and_asked_for_previews_is_that_of_nobody(tmp_path):
    """Curves, details, checkpoints and previews for the page: the same bits come out."""
    alone, watched = tmp_path / "alone", tmp_path / "runs" / "watched"
    assert forked.run(train_words(alone, 160)).returncode == 0
    requests = train_watched(watched, 160)
    assert digest(alone) == digest(watched)
    more = len(list((watched / "samples").iterdir())) - len(list((alone / "samples").iterdir()))
    assert 0 < more <= requests
    assert without_clock(alone / "metrics.jsonl") == without_clock(watched / "metrics.jsonl")


FORM = {"data.size": "8", "network": TRANSFORMER, "training.device": "cpu", "training.batch": "8"}
FORM |= {"optimizer.lr": "0.001"}
FORM |= {"training.steps": "100000", "training.precision": "fp32", "preview.images": "2", "sampler.steps": "2"}
FORM |= {"evaluate.images": "4", "evaluate.levels": "2"}


def beat_of(run: Path) -> dict:
    return json.loads((run / "heartbeat.json").read_text())


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_that_the_page_started_outlives_the_server_and_a_check_does_not(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    with serving(folder, "--source", few_images(), XDG_CONFIG_HOME=str(tmp_path)) as (web, process):
        source = next(one["id"] for one in web.get("api/state")["sources"] if one["name"] == few_images())
        wanted = {"source": source, "settings": FORM}
        status, dry = web.post("api/train?dry=1", wanted)
        assert (status, list(dry)) == (200, ["command"])
        assert not list(folder.iterdir())
        status, started = web.post("api/train", wanted)
        assert (status, started["command"]) == (200, dry["command"])
        wait_until(lambda: [row for row in web.get("api/runs") if row["state"] == "running" and row["step"]])
        assert web.post("api/doctor", wanted)[0] == 200
        listed = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    (run,) = folder.iterdir()
    training = beat_of(run)["pid"]
    children = {int(child) for child in listed.stdout.split()}
    assert training in children
    assert not [child for child in children - {training} if Path(f"/proc/{child}").exists()]
    step = beat_of(run)["step"]
    wait_until(lambda: beat_of(run)["step"] > step)
    with serving(folder, XDG_CONFIG_HOME=str(tmp_path)) as (web, _):
        (row,) = [row for row in web.get("api/runs") if row["state"] == "running"]
        assert web.post(f"api/runs/{row['id']}/ask", {"what": "stop"})[0] == 200
        wait_until(lambda: beat_of(run)["doing"] == "stopped")
        # A length that is reached already: it ends at once, with the output of a command.
        status, answer = web.post(f"api/runs/{row['id']}/resume", {"settings": {"training.steps": "1"}})
        assert status == 200
        task = wait_until(lambda: (got := web.get(f"api/tasks/{answer['task']}"))["status"] is not None and got)
        assert task["output"]
