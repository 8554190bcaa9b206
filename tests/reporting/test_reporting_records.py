"""The record: strict JSON, whole after a kill, equal to that of an uninterrupted run after a resume."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from unfog.files.safe_files import write_atomic
from unfog.reporting import records  # counts the lines that are parsed
from unfog.reporting.log_settings import Log
from unfog.reporting.recorder import Recorder, _trend  # its clock is set back; the word after the loss
from unfog.reporting.records import Events, Metrics, read_events, read_metrics
from unfog.text import format_bytes
from waiting import wait_until

WRITER = """
import sys
from pathlib import Path
from unfog.reporting.records import Metrics
metrics = Metrics(Path(sys.argv[1]), start=0)
step = 0
while True:
    step += 1
    metrics.write(step, step * 64, step * 0.5, {"loss": 1 / step, "loss_by_level": [1 / step] * 10})
"""


def strict(path: Path) -> list[dict]:
    """Parse every line, refusing what is JavaScript and not JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def write(path: Path, steps: range, start: int = 0) -> None:
    metrics = Metrics(path, start)
    for step in steps:
        metrics.write(step, step * 64, step * 0.1, {"loss": 1 / (step + 1), "lr": 1e-4})
    metrics.close()


def test_lines_read_back_as_written(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl", start=0)
    metrics.write(1, 64, 0.12345, {"loss": np.float32(0.1), "loss_by_level": np.arange(3.0), "refused": np.int64(2)})
    row = strict(tmp_path / "metrics.jsonl")[0]  # read while open: nothing is held back
    assert list(row)[:3] == ["step", "images", "seconds"]
    assert row["loss"] == float(np.float32(0.1))
    assert row["loss_by_level"] == [0.0, 1.0, 2.0]
    assert row["refused"] == 2
    assert row["seconds"] == 0.123
    assert read_metrics(tmp_path / "metrics.jsonl") == [row]
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_non_finite_numbers_stay_strict_json(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl", start=0)
    metrics.write(1, 64, 0, {"loss": math.nan, "loss_by_level": [1.0, math.inf], "lr": np.float32("-inf")})
    assert strict(tmp_path / "metrics.jsonl")[0]["loss_by_level"] == [1.0, None]
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert math.isnan(row["loss"])
    assert math.isnan(row["loss_by_level"][1])
    assert math.isnan(row["lr"])
    events = Events(tmp_path / "events.jsonl")
    events.write("step_refused", 7, {"gradient_norm": math.inf, "value": math.nan, "nested": {"a": (-math.inf,)}})
    strict(tmp_path / "events.jsonl")
    event = read_events(tmp_path / "events.jsonl")[0]
    assert (event["gradient_norm"], event["value"], event["nested"]) == ("inf", "nan", {"a": ["-inf"]})
    assert (event["kind"], event["step"]) == ("step_refused", 7)
    assert event["time"].endswith("+00:00")


def test_every_cut_of_the_last_line_is_tolerated_and_repaired(tmp_path):
    whole = tmp_path / "whole.jsonl"
    write(whole, range(1, 4))
    content = whole.read_bytes()
    last = content.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(content) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(content[:end])
        complete = end >= len(content) - 1  # the line itself is whole, only its newline is cut
        assert len(read_metrics(path)) == 2 + complete
        metrics = Metrics(path, start=10)
        assert metrics.damaged == (0 if complete or end == last else 1)
        metrics.write(4, 256, 0.4, {"loss": 0.5})
        metrics.close()
        assert [row["step"] for row in strict(path)] == [1, 2, *([3] if complete else []), 4]


@pytest.mark.parametrize("damage", [b"\x00\x00\x00\xff\n[1]\n", b"\x00\x00\x00\xff\n[1]", b'\n[1]\n\n{"step": 2, "ki'])
def test_damage_is_left_out_and_at_the_end_removed(damage, tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"step": 1, "kind": "started"}\n' + damage)
    assert [event["step"] for event in read_events(path)] == [1]
    events = Events(path)
    assert events.damaged == 2
    events.write("finished", 2, {})
    assert [event["step"] for event in strict(path)] == [1, 2]
    path.write_bytes(damage + b'\n{"step": 3, "kind": "started"}')
    assert Events(path).damaged == 0
    assert [event["step"] for event in read_events(path)] == [3]
    path.write_bytes(damage)
    assert (Events(path).damaged, path.read_bytes()) == (2, b"")


def test_opening_a_long_record_reads_what_is_dropped_and_no_more(tmp_path, monkeypatch):
    path, parsed = tmp_path / "metrics.jsonl", []
    path.write_bytes(b"".join(b'{"step": %d, "loss": 1}\n' % step for step in range(1, 100_001)))
    monkeypatch.setattr(records, "_parse", lambda line, parse=records._parse: parsed.append(line) or parse(line))
    metrics = Metrics(path, start=99_990)
    assert metrics.last["step"] == 99_990
    assert len(parsed) == 11
    assert path.read_bytes().endswith(b'{"step": 99990, "loss": 1}\n')


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_nothing_that_was_logged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for i in range(4):
        path.unlink(missing_ok=True)
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        wait_until(lambda: path.exists() and path.stat().st_size >= 50_000 * (i + 1), every=0.001)  # noqa: B023
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        steps = [row["step"] for row in read_metrics(path)]
        assert len(steps) > 100
        assert steps == list(range(1, len(steps) + 1))
        Metrics(path, start=steps[-1]).close()
        assert [row["step"] for row in strict(path)] == steps


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path):
    write(tmp_path / "a.jsonl", range(1, 101))
    write(tmp_path / "b.jsonl", range(1, 78))  # killed at 77, the newest checkpoint holds step 60
    with (tmp_path / "b.jsonl").open("ab") as file:
        file.write(b'{"step": 78, "ima')
    write(tmp_path / "b.jsonl", range(61, 101), start=60)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_a_resume_keeps_events(tmp_path):
    events = Events(tmp_path / "events.jsonl")
    events.write("stopped", 77, {})
    events.close()
    again = Events(tmp_path / "events.jsonl")
    again.write("resumed", 60, {"path": Path("a/b")})
    assert [(e["kind"], e["step"]) for e in read_events(tmp_path / "events.jsonl")] == [
        ("stopped", 77),
        ("resumed", 60),
    ]
    assert read_events(tmp_path / "events.jsonl")[1]["path"] == "a/b"


def test_an_untouched_file_is_not_rewritten(tmp_path):
    write(tmp_path / "a.jsonl", range(1, 5))
    before = os.stat(tmp_path / "a.jsonl").st_ino
    Metrics(tmp_path / "a.jsonl", start=4).close()
    assert os.stat(tmp_path / "a.jsonl").st_ino == before


def test_lines_wait_for_room_on_the_disk_and_arrive_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = Metrics(path, start=-1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as if the disk filled up in mid-line
    try:
        refused = 0
        for step in range(100):
            try:
                lines.append({"step": step, "text": "x" * 20})
            except OSError:
                refused += 1
        assert refused > 50
        assert path.stat().st_size == 1000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    lines.append({"step": 100})
    lines.close()
    assert [row["step"] for row in strict(path)] == list(range(101))


def test_write_atomic_leaves_the_old_file_or_the_new_one(tmp_path):
    path = tmp_path / "report.html"
    write_atomic(path, b"old", tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_atomic(path, b"new" * 100, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("report.html", b"old")]
    write_atomic(path, b"new", tmp_path)
    assert path.read_bytes() == b"new"


def test_a_resumed_run_tells_the_time_of_its_session_and_of_all(tmp_path):
    with Recorder(tmp_path, Log(), total=2) as first:
        first._opened -= 94
        first.log(1, 8, loss=1.0)
        assert first.describe_time(0.3) == "1 min 34 s, of which checkpoints took 0.3 s"
    with Recorder(tmp_path, Log(), total=2, start=1) as again:
        again._opened -= 242
        assert again.describe_time(0.3) == "4 min 02 s, of which checkpoints took 0.3 s; 5 min 36 s in all"


def test_a_loss_that_is_not_finite_has_no_trend():
    falling = [1.0 - step / 100 + step % 2 / 1000 for step in range(40)]
    assert [_trend(falling), _trend([0.5] * 40)] == [", falling", ", steady"]
    assert [_trend([*falling[:30], bad, *falling[30:]]) for bad in (math.nan, math.inf)] == ["", ""]
    assert _trend([math.nan] * 40) == ""


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 MB"), (1, "under 0.1 MB"), (99_999, "under 0.1 MB"), (1e5, "0.1 MB"), (340e6, "340 MB"), (1.6e9, "1.6 GB")],
)
def test_a_size_that_is_not_0_is_never_said_to_be(count, said):
    assert format_bytes(count) == said
