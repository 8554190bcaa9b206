"""Trackers, read back from their own files; and a run that outlives every failure of theirs."""

import importlib.util
import json
import re
import resource
import struct
import subprocess
import sys

import numpy as np
import pytest
from wandb.proto import wandb_internal_pb2

from unfog.errors import RequestError, install_command
from unfog.reporting import recorder as recorder_module
from unfog.reporting.log_settings import Log
from unfog.reporting.recorder import Recorder
from unfog.reporting.records import read_events, read_metrics
from unfog.reporting.trackers import open_tracker
from waiting import wait_until

PICTURE = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)


def accumulated(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0}).Reload()


@pytest.mark.slow
def test_tensorboard_reads_back_scalars_lists_and_pictures(tmp_path):
    with Recorder(tmp_path, Log(every=1, sinks=("tensorboard",)), total=3) as run:
        for step in (1, 2, 3):
            run.log(step, step * 10, loss=1 / step, loss_by_level=[0.5, 0.25])
        run.log_image(3, "samples", PICTURE)
        read = accumulated(tmp_path / "tensorboard")  # before the end, as after a kill
    assert [(e.step, e.value) for e in read.Scalars("loss")] == [(step, pytest.approx(1 / step)) for step in (1, 2, 3)]
    assert [e.value for e in read.Scalars("loss_by_level/1")] == [0.25] * 3
    bars = read.Histograms("loss_by_level")[0].histogram_value
    assert (bars.bucket_limit, bars.bucket) == ([0.5, 1.0], [0.5, 0.25])
    picture = read.Images("samples")[0]
    assert (picture.step, picture.height, picture.width) == (3, 8, 6)
    assert picture.encoded_image_string == (tmp_path / "samples" / "00000003.png").read_bytes()


def test_tensorboard_forgets_what_a_resume_writes_again(tmp_path):
    for start, end in ((0, 8), (5, 10)):
        sink = open_tracker("tensorboard", tmp_path, start, {})
        for step in range(start + 1, end + 1):
            sink.log_scalars(step, {"loss": step + start / 100})
        sink.close()
        # The files are read in the order of their names, which begin with the second.
        for path in (tmp_path / "tensorboard").glob("events.out.tfevents.[1-9]*"):
            path.rename(path.with_name(f"events.out.tfevents.0{start}"))
    scalars = accumulated(tmp_path / "tensorboard").Scalars("loss")
    assert [e.step for e in scalars] == list(range(1, 11))
    assert [round(e.value, 2) for e in scalars] == [1, 2, 3, 4, 5, 6.05, 7.05, 8.05, 9.05, 10.05]


@pytest.mark.slow
def test_wandb_works_offline_and_keeps_its_id(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    # An address where nobody answers: whatever needed the network would fail.
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(sys, "argv", ["unfog", "train", "https://me:SECRET@host/s.tar?signature=SECRET", "--lr=0.1"])
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", "https://SECRET:x@host/code.git"], check=True)
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "photos"
    for start in (0, 2):
        with Recorder(run_dir, Log(every=1, sinks=("wandb",)), total=4, start=start, config={"lr": 0.1}) as run:
            run.log(start + 1, 10, loss=0.5, loss_by_level=[1.0, 2.0])
            run.log(start + 2, 20, loss=0.25)
            run.log_image(start + 2, "samples", PICTURE)
    assert read_events(run_dir / "events.jsonl") == []
    name = f"run-{(run_dir / 'wandb' / 'id').read_text()}.wandb"

    def rows_kept():
        files = (run_dir / "wandb").glob(f"offline-run-*/{name}")
        return sorted((row for file in files for row in wandb_history(file)), key=lambda row: row["_step"])

    wait_until(lambda: len(rows_kept()) >= 4)  # its writer may close a little after it says so
    rows = rows_kept()
    assert [row["_step"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows] == [0.5, 0.25, 0.5, 0.25]
    assert rows[0]["loss_by_level/1"] == 2.0
    assert (rows[0]["loss_by_level.values"], rows[0]["loss_by_level.bins"]) == ([1.0, 2.0], [0.0, 0.5, 1.0])
    assert (rows[1]["samples.height"], rows[1]["samples.width"]) == (8, 6)
    stored = [path.read_bytes() for path in (run_dir / "wandb").rglob("*") if path.is_file()]
    assert any(b"--lr=0.1" in data for data in stored)
    assert not any(b"SECRET" in data for data in stored)
    assert "SECRET" in sys.argv[2]


def wandb_history(path):
    """The rows that a .wandb file holds: after 7 bytes, records of checksum, length, type (1: in one piece), data."""
    content, at, rows = path.read_bytes(), 7, []
    while at + 7 < len(content):
        _, size, kind = struct.unpack_from("<IHB", content, at)
        data = content[at + 7 : at + 7 + size]
        at += 7 + size
        if at > len(content):  # still being written
            break
        assert kind == 1
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


class Broken:
    name = "broken"

    def __init__(self):
        self.calls = 0

    def log_scalars(self, step, values):
        self.calls += 1
        raise ConnectionError("no route\nto host")

    def log_image(self, step, name, pixels):
        raise AssertionError("called after it failed")

    close = log_image


@pytest.mark.parametrize("when", ["opening", "logging"])
def test_a_sink_that_raises_is_left_out_and_the_run_goes_on(tmp_path, monkeypatch, capsys, when):
    broken = Broken()

    def open_broken(name, run_dir, start, config):
        if name == "wandb":
            if when == "opening":
                raise TimeoutError("no route to host")
            return broken
        return open_tracker(name, run_dir, start, config)

    monkeypatch.setattr(recorder_module, "open_tracker", open_broken)
    with Recorder(tmp_path, Log(every=1, sinks=("wandb", "tensorboard")), total=5) as run:
        for step in range(1, 6):
            run.log(step, step, loss=0.1)
        run.log_image(5, "samples", PICTURE)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    assert len(accumulated(tmp_path / "tensorboard").Scalars("loss")) == 5
    events = read_events(tmp_path / "events.jsonl")
    assert [event["kind"] for event in events] == ["sink_failed"]
    assert "no route to host" in events[0]["reason"]
    assert capsys.readouterr().err.count("warning:") == 1
    assert broken.calls == (1 if when == "logging" else 0)


def test_a_missing_package_is_refused_with_its_extra(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tensorboard" else find(name, *a))
    with pytest.raises(RequestError, match=re.escape(install_command("tb"))):
        Recorder(tmp_path / "run", Log(sinks=("tensorboard",)), total=1)
    assert not (tmp_path / "run").exists()


def test_settings_refuse_what_cannot_be():
    with pytest.raises(RequestError, match=r"mlfow.*mlflow.*custom:path="):
        Log(sinks=("mlfow",))
    with pytest.raises(RequestError, match="at least 1"):
        Log(every=-1)


@pytest.mark.slow
def test_nothing_is_imported_that_was_not_asked_for():
    code = (
        "import sys, unfog.reporting.log_settings; light = set(sys.modules);"
        "import unfog.reporting.recorder, unfog.reporting.report;"
        "assert not {'rich', 'numpy', 'PIL', 'jinja2'} & light;"
        "assert not {'torch', 'wandb', 'tensorboard', 'mlflow', 'comet_ml', 'trackio'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_recorder_counts_time_over_resumes_and_repairs(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "images": 20, "seconds": 100.0}\n{"step": 20, "sec')
    with Recorder(tmp_path, Log(every=1), total=20, start=10) as run:
        run.log(20, 40, loss=0.5)
    assert 100 <= read_metrics(tmp_path / "metrics.jsonl")[-1]["seconds"] < 130
    assert [event["kind"] for event in read_events(tmp_path / "events.jsonl")] == ["warning"]
    assert "metrics.jsonl: 1 line" in capsys.readouterr().err


def test_a_full_disk_is_said_once_and_nothing_raises(tmp_path, capsys, monkeypatch):
    run = Recorder(tmp_path, Log(every=1), total=500)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        for step in range(1, 501):
            run.log(step, step, loss=0.1)
        run.log_image(500, "samples", np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 501))
    assert capsys.readouterr().err.count("warning:") == 1
    assert [event["kind"] for event in read_events(tmp_path / "events.jsonl")] == ["warning"]
