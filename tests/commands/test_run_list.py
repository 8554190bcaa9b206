"""`unfog runs` and `unfog watch`: from run folders to a table, JSON and charts, without torch."""

import json
import math
import os
import pty
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from command import exit_status
from unfog.files.locks import MIRROR_MARK
from unfog.process.run_screen import screen_lines
from unfog.process.run_status import RunStatus, find_runs
from unfog.reporting.records import WAITING, read_metrics
from unfog.reporting.terminal_charts import ChartSpace, text_chart
from unfog.training.checkpoints.format import EMA


def lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_folder(path: Path, state: str = "running", config: str = "", rows: list[dict] | None = None) -> Path:
    """A run of 150 steps at step 60, whose last 20 steps took 0.5 s each."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(config or 'source = "photos"\n')
    rows = rows or [
        {"step": step, "seconds": step / 2, "loss": 1 / step, "held_out_loss": 2 / step} for step in (40, 60)
    ]
    lines(path / "metrics.jsonl", rows)
    events = [{"step": 0, "kind": "started", "steps": 150}]
    if state in ("finished", "stopped", "failed"):
        events.append({"step": 60, "kind": state, "reason": "RunError: the images\nare gone"})
    lines(path / "events.jsonl", events)
    begun = datetime.now(UTC) - timedelta(hours=state == "killed")
    beat = {"time": begun.isoformat(), "pid": os.getpid(), "host": socket.gethostname(), "step": 60, "steps": 150}
    running = state in ("running", "killed")
    beat |= {"doing": "training" if running else state, "next": 5 if running else None}
    (path / "heartbeat.json").write_text(json.dumps(beat))
    return path


def test_the_loss_before_the_first_step_is_no_best(tmp_path):
    run = run_folder(tmp_path / "run", rows=[{"step": 0, "held_out_loss": 1.8}, {"step": 20, "loss": 1.2}])
    assert RunStatus.read(run).best_text == "–"


def test_a_table_of_runs_in_each_state(tmp_path, capsys):
    for state in ("running", "finished", "stopped", "failed", "killed"):
        run_folder(tmp_path / "runs" / state, state)
    (tmp_path / "runs" / "begun").mkdir()
    (tmp_path / "runs" / "begun" / "config.toml").write_text("")
    assert exit_status("runs", tmp_path / "runs") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "best", "disk", "age"]
    table = {Path(row.split()[0]).name: row for row in rows}
    assert len(table) == 6
    assert "running, 45 s left  " in table["running"]
    assert "failed: RunError: the images are gone  " in table["failed"]
    assert "not begun  " in table["begun"]
    for state in ("finished", "stopped", "killed"):
        assert f"  {state}  " in table[state]
        assert "60/150" in table[state]
        assert "held_out_loss 0.03333" in table[state]
        assert " s" in table[state]


@pytest.mark.parametrize(("steps", "left"), [((1,), math.nan), ((1, 3), 147.0)])
def test_the_first_step_alone_says_nothing_of_the_time_left(tmp_path, steps, left):
    rows = [{"step": step, "seconds": 16.0 + step} for step in steps]  # 17 s for the first step, then 1 s each
    run = run_folder(tmp_path / "run", rows=rows)
    beat = json.loads((run / "heartbeat.json").read_text())
    (run / "heartbeat.json").write_text(json.dumps(beat | {"step": steps[-1]}))
    assert RunStatus.read(run).seconds_left == pytest.approx(left, nan_ok=True)


def test_json_has_numbers_and_null(tmp_path, capsys):
    run_folder(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.toml").write_text("[[[")
    assert exit_status("runs", tmp_path, "--json") == 0
    found = {Path(one["run"]).name: one for one in json.loads(capsys.readouterr().out)}
    a, b = found["a"], found["b"]
    assert (a["state"], a["step"], a["steps"], a["seconds_left"]) == ("running", 60, 150, 45.0)
    assert (a["metric"], a["best"], a["best_step"]) == ("held_out_loss", 2 / 60, 60)
    assert a["bytes"] > 0
    assert 0 <= a["age_seconds"] < 60
    assert (b["state"], b["step"], b["steps"], b["best"], b["seconds_left"]) == ("not begun", 0, None, None, None)


def exported(path: Path, step: object = 900, files: object = None) -> Path:
    """A folder as `unfog export --format run` leaves it: settings, and weights with a manifest."""
    place = path / "checkpoints" / "00000900"
    place.mkdir(parents=True)
    (path / "config.toml").write_text("")
    manifest = {"format": 4, "step": step, "files": {EMA: {}} if files is None else files}
    (place / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_an_export_is_a_run_without_training_left(tmp_path, capsys):
    export = exported(tmp_path / "export")
    beat = {"time": datetime.now(UTC).isoformat(), "pid": 1, "host": "", "doing": "failed: RequestError", "next": None}
    (export / "heartbeat.json").write_text(json.dumps(beat))  # of a resume that was refused
    assert exit_status("runs", tmp_path, "--json", "--finished") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["steps"], found["seconds_left"]) == ("exported", 900, None, None)
    run_folder(tmp_path / "run", "stopped")
    assert exit_status("runs", tmp_path, "--finished") == 3
    assert re.search(r"export\s+exported\s+900 ", capsys.readouterr().out)


@pytest.mark.parametrize(
    "damage", [{"step": None}, {"files": []}, {"files": {EMA: {}, "state.json": {}}}, {"files": 1}]
)
def test_another_manifest_is_no_export(tmp_path, damage):
    run = exported(tmp_path / "a", **damage)
    assert RunStatus.read(run).state == "not begun"
    # Nothing is read through a link.
    run_of = exported(tmp_path / "b")
    (run / "checkpoints").rename(run / "own")
    (run / "checkpoints").symlink_to(run_of / "checkpoints")
    assert RunStatus.read(run).state == "not begun"


@pytest.mark.parametrize(
    ("ended", "shown", "status"),
    [("running", "mirror", 3), ("stopped", "mirror: stopped", 3), ("finished", "mirror: finished", 0)],
)
def test_a_mirror_is_a_copy_and_no_killed_run(tmp_path, ended, shown, status):
    mirror = run_folder(tmp_path / "mirror", ended)
    beat = json.loads((mirror / "heartbeat.json").read_text())
    (mirror / "heartbeat.json").unlink()
    (mirror / MIRROR_MARK).write_text("")
    found = RunStatus.read(mirror)
    assert (found.state, found.state_text, found.step) == ("mirror", shown, 60)
    assert exit_status("runs", mirror, "--finished") == status
    # A resume that was refused changes nothing; one in the mirror itself makes it the run.
    for doing, state in (("failed: RequestError", "mirror"), ("training", "running")):
        (mirror / "heartbeat.json").write_text(
            json.dumps(beat | {"doing": doing, "next": 5 * (doing == "training") or None})
        )
        assert RunStatus.read(mirror).state == state


def test_a_run_that_waits_has_a_gauge_and_no_time_left(tmp_path, capsys):
    run = run_folder(tmp_path / "run")
    beat = json.loads((run / "heartbeat.json").read_text())
    for reason, doing in WAITING.items():
        (run / "heartbeat.json").write_text(json.dumps(beat | {"doing": doing}))
        assert exit_status("runs", run, "--prometheus") == 0
        said = capsys.readouterr().out
        assert f'reason="{reason}"}} 1' in said
        assert said.count("unfog_run_waiting{") == len(WAITING)
        assert said.count('"} 1\n') == 2  # it, and the state
        assert "unfog_run_seconds_left{" not in said
    assert RunStatus.read(run).state_text == f"running, {doing}"


@pytest.mark.parametrize(
    ("mirror", "kinds", "age"),
    [
        ("m", (), math.nan),
        ("m", ("resumed",), math.nan),
        ("m", ("mirrored", "mirror_failed"), 120),
        ("m", ("mirror_failed", "mirror_failed"), 120),
        ("m", ("mirrored", "resumed"), 60),
        ("m", ("mirrored", "resumed", "mirrored"), 0),
        ("", ("mirrored", "resumed"), math.nan),
    ],
)
def test_the_age_of_the_mirror_is_that_of_its_last_copy_of_the_session(tmp_path, mirror, kinds, age):
    run = run_folder(tmp_path / "run", config=f'source = "photos"\n[checkpoint]\nmirror = "{mirror}"\n')
    with (run / "events.jsonl").open("a") as events:
        for kind, minutes in zip(kinds, (2, 1, 0)):
            row = {"time": (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat(), "step": 60, "kind": kind}
            events.write(json.dumps(row) + "\n")
    assert RunStatus.read(run).mirror_age == pytest.approx(age, abs=20, nan_ok=True)


def test_prometheus_reads_the_numbers_that_json_has(tmp_path, capsys):
    run_folder(tmp_path / 'a "quoted"\\\nname')
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.toml").write_text("")
    assert exit_status("runs", tmp_path, "--json") == 0
    listed = {one["run"]: one for one in json.loads(capsys.readouterr().out)}
    assert exit_status("runs", tmp_path, "--prometheus", "--finished") == 3
    samples, declared = {}, []
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("# "):
            declared.append(line.split()[2])
            continue
        # The grammar of prometheus.io for a sample: name{label="value",…} number.
        name, labels, value = re.fullmatch(r'(\w+)\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)+)\} (\S+)', line).groups()
        assert declared[-2:] == [name, name]
        found = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))
        run = re.sub(r"\\(.)", lambda one: {"n": "\n"}.get(one[1], one[1]), found.pop("run"))
        samples[name, run, *found.values()] = float(value)
    for run, one in listed.items():
        assert samples["unfog_run_step", run] == one["step"]
        assert samples["unfog_run_state", run, one["state"]] == 1
        assert sum(value for (name, of, *_), value in samples.items() if (name, of) == ("unfog_run_state", run)) == 1
        if one["best"] is None:
            assert not any(name == "unfog_run_best" and of == run for name, of, *_ in samples)
        else:
            assert samples["unfog_run_best", run, "held_out_loss"] == one["best"]
    assert exit_status("runs", tmp_path, "--prometheus", "--json") == 2


@pytest.mark.parametrize(("metric", "best"), [("kid", 0.1), ("precision", 0.3)])
def test_the_best_value_is_that_of_the_metric_that_chooses(tmp_path, metric, best):
    rows = [{"step": step, "seconds": 1, metric: value} for step, value in ((10, 0.2), (20, best), (30, 0.2))]
    status = RunStatus.read(run_folder(tmp_path / "a", config=f'[evaluate]\nbest = "{metric}"\n', rows=rows))
    assert (status.metric, status.best, status.best_step) == (metric, best, 20)


def test_runs_are_found_in_folders_of_runs_and_not_within_runs(tmp_path):
    names = ("a", "more/b", "more/c")
    for name in names:
        run_folder(tmp_path / name)
    (tmp_path / "a" / "checkpoints" / "00000060").mkdir(parents=True)
    shutil.copy(tmp_path / "a" / "config.toml", tmp_path / "a" / "checkpoints" / "00000060")
    (tmp_path / "photos").mkdir()
    assert find_runs(tmp_path) == [tmp_path / name for name in names]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]


def test_a_folder_without_runs_and_one_that_is_missing(tmp_path, capsys, monkeypatch):
    assert exit_status("runs", tmp_path) == 0
    assert "no runs in" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert exit_status("runs") == 2
    assert "give the folder that holds runs" in capsys.readouterr().err
    assert exit_status("runs", "a", "b") == 2


def test_broken_checkpoints_are_listed_and_removed_on_request(tmp_path, capsys):
    """Only what is inside the run goes: not what a link names."""
    one, other, kept = run_folder(tmp_path / "r" / "one"), run_folder(tmp_path / "r" / "other"), tmp_path / "kept"
    for folder in (
        one / "checkpoints" / ".broken-00000010",
        one / "checkpoints" / "00000020",
        kept / ".broken-00000030",
    ):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(5000))
    (one / "checkpoints" / ".broken-00000011").symlink_to(kept)
    (other / "checkpoints").symlink_to(kept)
    assert exit_status("runs", tmp_path / "r") == 0
    said = capsys.readouterr().err
    assert ".broken-00000010" in said
    assert "2 broken checkpoints" in said
    assert "--remove-broken" in said
    assert exit_status("runs", tmp_path / "r", "--remove-broken") == 0
    assert [path.name for path in (one / "checkpoints").iterdir()] == ["00000020"]
    assert (kept / ".broken-00000030" / "model.safetensors").exists()


def test_reading_the_end_of_a_record_leaves_out_the_line_that_is_cut(tmp_path):
    lines(tmp_path / "metrics.jsonl", [{"step": step} for step in range(1000)])
    rows = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl", 100)]
    assert rows == list(range(1000 - len(rows), 1000))
    assert 0 < len(rows) < 10
    assert len(read_metrics(tmp_path / "metrics.jsonl", 2**20)) == 1000


def test_one_frame_shows_state_progress_and_four_charts(tmp_path, capsys):
    folder = run_folder(tmp_path / "a")
    assert exit_status("watch", folder, "--once") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "a, running, 45 s left, step 60/150"
    assert "40%" in shown[1]
    assert "loss 0.01667" in shown
    assert "held-out loss 0.03333" in shown
    assert shown[shown.index("images/s") + 1].strip() == "no values yet"
    assert any("\u2800" < char < "\u28ff" for char in "".join(shown))
    assert "\x1b" not in "".join(shown)
    assert exit_status("watch", tmp_path / "none") == 2
    assert exit_status("watch", folder, "--interval", "0") == 2


@pytest.mark.parametrize(("width", "height"), [(20, 5), (80, 24), (200, 60)])
@pytest.mark.parametrize("unicode", [True, False])
def test_a_frame_fits_its_width(tmp_path, width, height, unicode):
    rows = [{"step": i, "seconds": i, "loss": 1 / i, "lr": 1e-3, "held_out_loss": None} for i in range(1, 3000)]
    shown = screen_lines(run_folder(tmp_path / "a", rows=rows), width, height, unicode)
    assert max(map(len, shown)) <= width
    assert "".join(shown).isascii() or unicode
    if height >= 24:
        assert len(shown) <= height


def test_a_text_chart_has_its_extremes_where_they_belong():
    chart = text_chart(np.array([0.0, 10, 20]), np.array([1.0, 3, 2]), ChartSpace(31, 5, unicode=False))
    assert [line[:9].strip() for line in chart[:-1]] == ["3", "", "", "1"]
    assert chart[0][11:].strip().startswith("*")
    assert chart[0][11:].index("*") in range(9, 11)
    assert chart[3][11:].startswith("*")
    assert chart[-1].split() == ["0", "20"]


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0], [-1e99, 1e99], [0.0, 1e-300], list(range(5000))])
def test_a_text_chart_of_any_numbers(values):
    for from_zero in (True, False):
        chart = text_chart(np.arange(len(values), dtype=float), np.array(values, float), ChartSpace(40, 6), from_zero)
        assert len(chart) == 6
        assert max(map(len, chart)) <= 40


@pytest.mark.slow
def test_neither_command_loads_torch(tmp_path):
    run_folder(tmp_path / "a")
    code = (
        "import sys\n"
        "from unfog.cli.main import main\n"
        "for words in (['runs', sys.argv[1]], ['watch', sys.argv[1] + '/a']):\n"
        "    try: main(words)\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True, timeout=300)


def watch_in_terminal(folder: Path) -> tuple[int, int]:
    """Start `unfog watch`. Return its process and its terminal."""
    child, terminal = pty.fork()
    if not child:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        os.execv(sys.executable, [sys.executable, "-m", "unfog", "watch", str(folder), "--interval", "0.2"])
    return child, terminal


def read_until(terminal: int, text: bytes, times: int = 1) -> bytes:
    """Return what a terminal shows from now on, until a text was shown that many times."""
    shown, end = b"", time.monotonic() + 60
    while shown.count(text) < times:
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 65536)
    return shown


@pytest.mark.slow
def test_watch_goes_on_after_an_outage_of_the_run_folder(tmp_path):
    folder = run_folder(tmp_path / "a")
    child, terminal = watch_in_terminal(folder)
    read_until(terminal, b"60/150")
    folder.rename(tmp_path / "moved")
    shown = read_until(terminal, b"its folder cannot be reached", 2)
    assert b"learning rate" in shown[shown.index(b"cannot be reached") :], "the last charts stay"
    folder.mkdir()  # the mount point of a mount that is gone
    shown = read_until(terminal, b"learning rate", 3)
    assert b"cannot be reached" in shown[shown.index(b"learning rate") :]
    folder.rmdir()
    (tmp_path / "moved").rename(folder)
    read_until(terminal, b"60/150", 2)
    os.write(terminal, b"q")
    with suppress(OSError):  # the terminal closes with its last process
        while os.read(terminal, 65536):
            pass
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_watch_in_a_terminal_until_a_key_is_pressed(tmp_path, key):
    child, terminal = watch_in_terminal(run_folder(tmp_path / "a"))
    shown = read_until(terminal, b"learning rate", 2)  # refreshed
    os.write(terminal, key)
    try:
        while select.select([terminal], [], [], 30)[0] and (more := os.read(terminal, 65536)):
            shown += more
    except OSError:  # the terminal closes with its last process
        pass
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"running" in shown
    assert b"\x1b[?1049h" in shown  # a screen of its own, which leaves what stood there
    assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"\x1b[?1049h")
    assert b"\x1b[?25h" in shown[shown.rindex(b"\x1b[?25l") :]
    assert b"Traceback" not in shown


def test_the_report_of_a_run_that_has_not_ended_says_how_far_it_is(tmp_path, capsys):
    for state, said in (("running", "60/150, 45 s left"), ("killed", "60/150")):
        assert exit_status("report", run_folder(tmp_path / state, state)) == 0
        text = (tmp_path / state / "report.html").read_text()
        assert f'"status":{{"state":"{state}","detail":"{said}",' in text
        assert capsys.readouterr().out == f"{tmp_path / state / 'report.html'}\n"
