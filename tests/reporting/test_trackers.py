"""MLflow, trackio and Comet, each written offline by its real library and read back from its own files."""

import importlib.util
import json
import logging
import re
import shutil
import sqlite3
import subprocess
import sys
import zipfile
from contextlib import suppress

import numpy as np
import pytest

from unfog.errors import RequestError, install_command
from unfog.reporting.log_settings import Log
from unfog.reporting.recorder import Recorder
from unfog.reporting.records import read_events
from unfog.reporting.trackers import _silence_handlers, _stored_id  # what is left of a tracker after it was closed

PICTURE = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)
CONFIG = {"lr": 0.1, "training": {"batch": 4, "budget": ""}, "data": {"crops": (1, 2)}}
VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "COMET_START_ONLINE", "COMET_PROJECT_NAME")


def recorded_twice(folder, tracker, config=CONFIG):
    """A run of four steps that was resumed after two."""
    for start, settings in ((0, config), (2, {**config, "lr": 0.2})):
        with Recorder(folder, Log(every=1, sinks=(tracker,)), total=4, start=start, config=settings) as run:
            run.log(start + 1, 10, loss=0.5, loss_by_level=[1.0, None, 2.0])
            run.log(start + 2, 20, loss=0.25)
            run.log_image(start + 2, "samples", PICTURE)
    assert read_events(folder / "events.jsonl") == []


@pytest.fixture(autouse=True)
def secret(tmp_path, monkeypatch):
    """A word in environment, arguments and git, where trackers look; and proxies that lead nowhere."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "COMET_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "SECRET" * 6)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr(sys, "argv", ["unfog", "train", "https://me:SECRET@host/s.tar"])
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", "https://SECRET:x@host/code.git"], check=True)
    monkeypatch.chdir(tmp_path)
    return b"SECRET"


def contents(folder):
    """Every file in a folder, those of archives too."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        yield path.read_bytes()
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                yield from (archive.read(name) for name in archive.namelist())


@pytest.mark.slow
def test_mlflow_keeps_one_run(tmp_path, secret):
    run_dir = tmp_path / "photos"
    # More settings than MLflow takes at once.
    recorded_twice(run_dir, "mlflow", {**CONFIG, "more": {f"s{i}": i for i in range(120)}})
    from mlflow.tracking import MlflowClient

    client = MlflowClient((run_dir / "mlflow" / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("unfog").experiment_id])
    assert run.info.run_id == (run_dir / "mlflow" / "id").read_text()
    assert (run.info.run_name, run.info.status) == ("photos", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 0.25), (3, 0.5), (4, 0.25)]
    assert [one.value for one in client.get_metric_history(run.info.run_id, "loss_by_level/2")] == [2.0, 2.0]
    assert run.data.params["training.batch"] == "4"
    assert run.data.params["lr"] == "0.1"
    assert run.data.params["more.s119"] == "119"
    config = json.loads(next(run_dir.rglob("artifacts/config.json")).read_text())
    assert config["lr"] == 0.2
    assert len(list(run_dir.rglob("artifacts/images/samples*.png"))) == 2
    assert not any(secret in data for data in contents(run_dir))


@pytest.mark.slow
def test_mlflow_writes_into_the_run_alone(tmp_path):
    """A copied store names its old place, and one of a stranger any other."""
    recorded_twice(tmp_path / "old", "mlflow")
    run_dir, elsewhere, config = tmp_path / "new", tmp_path / "elsewhere", {**CONFIG, "lr": 0.3}
    shutil.copytree(tmp_path / "old", run_dir)
    elsewhere.mkdir()
    for file in run_dir.rglob("meta.yaml"):
        hostile = rf'"\1": "{elsewhere.as_uri()}"'
        file.write_text(re.sub("(?m)^(artifact_(?:uri|location)):.*$", hostile, file.read_text()))

    def rate(folder):
        return json.loads(next(folder.rglob("artifacts/config.json")).read_text())["lr"]

    from mlflow.tracking._tracking_service.utils import _artifact_repos_cache

    _artifact_repos_cache.clear()  # by ids of runs, which the copy has too; another process has its own

    def go_on(step):
        with Recorder(run_dir, Log(every=1, sinks=("mlflow",)), total=step, start=step - 1, config=config) as run:
            run.log(step, 50, loss=0.5)
        return [event["kind"] for event in read_events(run_dir / "events.jsonl")]

    assert go_on(5) == []
    assert (rate(run_dir), rate(tmp_path / "old")) == (0.3, 0.2)
    assert not list(elsewhere.iterdir())
    metric = next(run_dir.rglob("metrics/loss"))
    metric.unlink()
    metric.symlink_to(elsewhere / "profile")
    assert go_on(6)  # the tracker is dropped
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("found", ["../../elsewhere", "", "a" * 65, "a\nb"])
def test_an_id_that_is_a_path_is_not_used(tmp_path, found):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "id").write_text(found)
    with pytest.raises(ValueError, match="no id"):
        _stored_id(tmp_path, "wandb", str)


@pytest.mark.slow
def test_comet_writes_archives_of_one_experiment(tmp_path, secret):
    run_dir = tmp_path / "photos"
    recorded_twice(run_dir, "comet")
    archives = sorted((run_dir / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime_ns)
    assert len(archives) == 2
    metrics, curves, images, lr = [], [], 0, []
    for path in archives:
        with zipfile.ZipFile(path) as archive:
            experiment = json.loads(archive.read("experiment.json"))
            assert experiment["offline_id"] == (run_dir / "comet" / "id").read_text()
            assert experiment["resume_strategy"] == "get_or_create"
            for line in archive.read("messages.json").splitlines():
                message = json.loads(line)
                payload = message["payload"]
                match message["type"]:
                    case "metric_msg" if payload["metric"]["metricName"] == "loss":
                        metrics.append((payload["metric"]["step"], payload["metric"]["metricValue"]))
                    case "parameter_msg" if payload.get("param", {}).get("paramName") == "lr":
                        lr.append(payload["param"]["paramValue"])
                    case "file_upload" if payload["upload_type"] == "curve":
                        curves.append(json.loads(archive.read(payload["file_path"])))
                    case "file_upload" if payload["upload_type"] == "visualization":
                        images += archive.read(payload["file_path"]).startswith(b"\x89PNG")
    assert metrics == [(1, 0.5), (2, 0.25), (3, 0.5), (4, 0.25)]
    assert lr == [0.1, 0.2]
    assert [curve["y"] for curve in curves] == [[1.0, 0.0, 2.0]] * 2
    assert curves[0]["x"] == pytest.approx([1 / 6, 1 / 2, 5 / 6])
    assert images == 2
    assert not any(secret in data for data in contents(run_dir))


def test_trackio_goes_on_with_its_run(tmp_path, monkeypatch, capfd, secret):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "kept"))  # which it reads when it is imported
    pytest.importorskip("trackio", reason="not in unfog[dev], as it wants an older Pillow")
    run_dir = tmp_path / "photos"
    recorded_twice(run_dir, "trackio")
    assert capfd.readouterr().out == ""
    with sqlite3.connect(tmp_path / "kept" / "unfog.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in rows} == {f"photos-{(run_dir / 'trackio' / 'id').read_text()}"}
    logged = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert [(step, row["loss"]) for step, row in logged if "loss" in row] == [(1, 0.5), (2, 0.25), (3, 0.5), (4, 0.25)]
    bars = [row["loss_by_level"] for _, row in logged if "loss_by_level" in row]
    assert [one["values"] for one in bars] == [[1.0, 0.0, 2.0]] * 2
    assert bars[0]["bins"] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert len(list((tmp_path / "kept").rglob("*.png"))) == 2
    assert not any(secret in data for folder in (run_dir, tmp_path / "kept") for data in contents(folder))


@pytest.mark.parametrize(
    ("tracker", "package", "extra"),
    [("mlflow", "mlflow", "mlflow"), ("trackio", "trackio", "trackio"), ("comet", "comet_ml", "comet")],
)
def test_a_missing_package_is_refused_with_its_extra(tmp_path, monkeypatch, tracker, package, extra):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a))
    with pytest.raises(RequestError, match=re.escape(install_command(extra))):
        Recorder(tmp_path / "run", Log(sinks=(tracker,)), total=1)
    assert not (tmp_path / "run").exists()


OWN = """
from unfog.reporting.tracker_base import Tracker

class Own(Tracker):
    def __init__(self, run_dir, start, config, file="own.txt"):
        self.file = run_dir / file
        self.write("start", start, config["lr"])

    def write(self, *words):
        with self.file.open("a") as file:
            print(*words, file=file)

    def log_histogram(self, step, name, values):
        self.write(step, name, *values)

class Fails(Tracker):
    name = "of mine"

    def log_scalars(self, step, values):
        raise RuntimeError("no")
"""


def test_a_tracker_of_ones_own_gets_arguments_and_may_fail(tmp_path, monkeypatch, capsys):
    name = f"own_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    sinks = (f"custom:path={name}.Own,file='bars.txt'", f"custom:path={name}.Fails")
    with Recorder(tmp_path / "run", Log(every=1, sinks=sinks), total=2, config=CONFIG) as run:
        run.log(1, 10, loss=0.5, held_out_by_level=[1.0, None])
        run.log(2, 20, loss=0.25)
        run.log_image(2, "samples", PICTURE)  # which the base class passes over
    assert (tmp_path / "run" / "bars.txt").read_text() == "start 0 0.1\n1 held_out_by_level 1.0 0.0\n"
    (event,) = read_events(tmp_path / "run" / "events.jsonl")
    assert (event["kind"], event["sink"], event["reason"]) == ("sink_failed", "of mine", "RuntimeError: no")
    assert capsys.readouterr().err.count("warning:") == 1


def test_a_logger_whose_file_takes_no_line_prints_no_traceback(capfd):
    logger = logging.getLogger("test of a full disk")
    _silence_handlers(logger)
    with open("/dev/full", "w") as full:
        handler = logging.StreamHandler(full)
        logger.addHandler(handler)
        logger.error("a line")
        logger.removeHandler(handler)
        with suppress(OSError):
            full.close()
    assert capfd.readouterr().err == ""


AGAIN = """
from unfog.reporting.tracker_base import Tracker

class Again(Tracker):
    name = "ours"
    again = "has both records of each"
"""


@pytest.mark.parametrize(("kind", "said"), [("Again", True), ("Tracker", False)])
def test_a_resume_that_logs_steps_again_says_what_the_tracker_has(tmp_path, monkeypatch, capsys, kind, said):
    name = f"again_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(AGAIN)
    monkeypatch.syspath_prepend(tmp_path)
    log = Log(every=1, sinks=(f"custom:path={name}.{kind}",))
    with Recorder(tmp_path / "run", log, total=5) as run:
        for step in range(1, 6):
            run.log(step, 10 * step, loss=0.5)
    with Recorder(tmp_path / "run", log, total=5, start=5):  # it was saved there
        assert "logged again" not in capsys.readouterr().err
    with Recorder(tmp_path / "run", log, total=5, start=2):
        told = capsys.readouterr().err
    assert ("steps 3 to 5 are logged again" in told) == said
    assert told.count("logged again") == said
