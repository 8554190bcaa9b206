"""The heartbeat and the two request files, with real threads and real files."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from textwrap import dedent

import pytest

from unfog.cli.main import main
from unfog.errors import RequestError
from unfog.process import heartbeat as module
from unfog.process import run_folder
from unfog.process.heartbeat import Heartbeat
from unfog.process.signals import StopSignals
from unfog.reporting.records import run_state
from waiting import wait_until

pytestmark = pytest.mark.slow


def fast(folder, stop=None):
    return Heartbeat(folder, stop or StopSignals(), interval=0.05)


def test_heartbeat_says_who_where_and_what(tmp_path):
    with Heartbeat(tmp_path, StopSignals()) as heartbeat:
        first = Heartbeat.read(tmp_path)
        assert first["pid"] == os.getpid()
        assert (first["step"], first["steps"], first["doing"], first["alive"]) == (0, 0, "starting", True)
        assert abs(datetime.fromisoformat(first["time"]) - datetime.now(UTC)) < timedelta(seconds=60)
        assert first["host"]
        heartbeat.step, heartbeat.activity = 7, "preview"
        wait_until(
            lambda: Heartbeat.read(tmp_path)["doing"] == "preview", 3
        )  # sooner than the five seconds between two
        assert Heartbeat.read(tmp_path)["step"] == 7


@pytest.mark.parametrize(("hours", "alive"), [(0, True), (24, False)])
def test_a_heartbeat_from_the_future_is_not_alive(tmp_path, hours, alive):
    beat = {"time": (datetime.now(UTC) + timedelta(hours=hours)).isoformat(), "pid": 1, "host": "elsewhere", "next": 5}
    (tmp_path / "heartbeat.json").write_text(json.dumps(beat))
    assert Heartbeat.read(tmp_path)["alive"] == alive


@pytest.mark.parametrize("interval", [1e300, float("inf"), float("nan"), 10**400])
def test_a_heartbeat_that_promises_no_other_is_not_alive_for_ever(tmp_path, interval):
    written = (datetime.now(UTC) - timedelta(days=2)).isoformat()
    beat = {"time": written, "pid": 1, "host": "elsewhere", "next": interval}
    (tmp_path / "heartbeat.json").write_text(json.dumps(beat))
    assert Heartbeat.read(tmp_path)["alive"] is False


def test_a_run_with_a_heartbeat_from_the_future_is_not_running(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text("")
    (tmp_path / "run/events.jsonl").write_text('{"kind": "started", "step": 0}\n')
    written = (datetime.now(UTC) + timedelta(days=2)).isoformat()
    beat = {"time": written, "pid": 1, "host": "elsewhere", "next": 5, "doing": "training", "step": 3, "steps": 9}
    (tmp_path / "run/heartbeat.json").write_text(json.dumps(beat))
    os.utime(tmp_path / "run/heartbeat.json", (time.time() + 1e6, time.time() + 1e6))
    for words in (["runs", str(tmp_path)], ["watch", str(tmp_path / "run"), "--once"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
        assert "killed" in capsys.readouterr().out
    # The heartbeat of another machine counts although the lock is granted.
    with run_folder.RunFolder(tmp_path / "run").locked():
        pass
    del beat["step"]
    (tmp_path / "run/heartbeat.json").write_text(json.dumps(beat | {"time": datetime.now(UTC).isoformat()}))
    with (
        pytest.raises(RequestError, match=r"another process \(1 on elsewhere\)"),
        run_folder.RunFolder(tmp_path / "run").locked(),
    ):
        pass


def test_a_heartbeat_of_lists_in_lists_is_none(tmp_path):
    (tmp_path / "heartbeat.json").write_text("[" * 100_000 + "]" * 100_000)
    assert Heartbeat.read(tmp_path) is None


def test_heartbeat_goes_on_while_the_main_thread_waits(tmp_path):
    with fast(tmp_path) as heartbeat:
        heartbeat.step = 3
        before = Heartbeat.read(tmp_path)["time"]
        wait_until(lambda: Heartbeat.read(tmp_path)["time"] > before)
        wait_until(lambda: Heartbeat.read(tmp_path)["step"] == 3)


def test_it_ends_at_once_and_says_how(tmp_path):
    with Heartbeat(tmp_path, StopSignals(), interval=600) as heartbeat:
        time.sleep(0.1)
        started = time.monotonic()
        heartbeat.step = 1000
        heartbeat.end("finished")
        assert time.monotonic() - started < 60, "an interval is 600"
        heartbeat.end("stopped")
    beat = Heartbeat.read(tmp_path)
    assert (beat["doing"], beat["step"], beat["alive"]) == ("finished", 1000, False)
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


@pytest.mark.parametrize(
    ("error", "how"), [(None, "ended"), (ValueError("bad"), "failed: ValueError"), (KeyboardInterrupt(), "interrupted")]
)
def test_a_session_that_says_nothing_has_ended_all_the_same(tmp_path, error, how):
    def session():
        with Heartbeat(tmp_path, StopSignals()):
            if error:
                raise error

    if error:
        with pytest.raises(type(error)):
            session()
    else:
        session()
    assert Heartbeat.read(tmp_path)["doing"] == how


def test_save_is_asked_for_until_it_is_met_and_can_be_asked_again(tmp_path):
    with fast(tmp_path) as heartbeat:
        for _ in range(2):
            time.sleep(0.15)
            assert not heartbeat.save_requested
            (tmp_path / "SAVE").touch()
            wait_until(lambda: heartbeat.save_requested)
            heartbeat.save_finished()  # another checkpoint
            assert heartbeat.save_requested
            heartbeat.save_started()
            assert not heartbeat.save_requested
            time.sleep(0.15)
            assert not heartbeat.save_requested
            assert (tmp_path / "SAVE").exists(), "until it is on the disk"
            heartbeat.save_finished()
            assert not (tmp_path / "SAVE").exists()


def test_stop_is_passed_on_and_taken_away(tmp_path, capfd):
    stop = StopSignals()
    with fast(tmp_path, stop):
        assert not stop()
        (tmp_path / "STOP").touch()
        wait_until(stop)
        wait_until(lambda: not (tmp_path / "STOP").exists())
    assert stop.received == "STOP file"
    assert capfd.readouterr().err == "STOP file: stopping and saving\n"


def test_stop_cuts_off_what_does_not_look(tmp_path):
    body = f"""
        import time
        from pathlib import Path
        from unfog.errors import Interrupted
        from unfog.process.heartbeat import Heartbeat
        from unfog.process.signals import StopSignals
        with StopSignals() as stop, Heartbeat(Path({str(tmp_path)!r}), stop) as pulse:
            print("ready", flush=True)
            try:
                time.sleep(120)
            except Interrupted as interrupted:
                print(interrupted)
    """
    with python(body) as process:
        assert process.stdout.readline() == "ready\n"
        (tmp_path / "STOP").touch()
        assert process.communicate(timeout=60)[0] == "STOP file\n"


def test_requests_that_cannot_be_removed_are_met_once(tmp_path, capfd):
    stop = StopSignals()
    with fast(tmp_path, stop) as heartbeat:
        (tmp_path / "SAVE").mkdir()  # which `unlink` does not take
        (tmp_path / "STOP").mkdir()
        wait_until(lambda: heartbeat.save_requested)
        wait_until(stop)
        heartbeat.save_started()
        heartbeat.save_finished()
        time.sleep(0.3)
        assert not heartbeat.save_requested
        os.utime(tmp_path / "SAVE", (1, 1))  # asked again
        wait_until(lambda: heartbeat.save_requested)
    assert capfd.readouterr().err.count("\n") == 1


def test_a_preview_is_requested_once_for_each_file(tmp_path):
    with fast(tmp_path) as heartbeat:
        for _ in range(2):
            assert not heartbeat.preview_requested
            (tmp_path / "PREVIEW").touch()
            wait_until(lambda: heartbeat.preview_requested)
            assert not (tmp_path / "PREVIEW").exists()
            time.sleep(0.15)
            assert heartbeat.preview_requested  # until the session generates it
            heartbeat.preview_requested = False
        assert not heartbeat.save_requested


def test_a_preview_that_is_generated_during_a_look_for_requests_is_not_generated_again(tmp_path):
    looks = []
    with fast(tmp_path) as heartbeat:
        take, heartbeat.preview_requested = heartbeat._take, True

        def generate_meanwhile(name):
            heartbeat.preview_requested = False
            looks.append(name)
            return take(name)

        heartbeat._take = generate_meanwhile
        wait_until(lambda: looks.count("PREVIEW") > 1)
    assert not heartbeat.preview_requested


def test_requests_from_before_the_start_are_not_obeyed_and_that_is_said(tmp_path, capsys):
    (tmp_path / "SAVE").touch()
    (tmp_path / "PREVIEW").touch()
    (tmp_path / "STOP").mkdir()
    stop = StopSignals()
    with fast(tmp_path, stop) as heartbeat:
        time.sleep(0.3)
        assert not heartbeat.save_requested
        assert not heartbeat.preview_requested
        assert not stop()
    assert not (tmp_path / "SAVE").exists()
    said = capsys.readouterr().err
    assert f"{tmp_path / 'SAVE'} existed before" in said
    assert f"{tmp_path / 'STOP'} existed before" in said


def test_a_folder_that_vanishes_stops_nothing(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with fast(folder) as heartbeat:
        folder.rename(tmp_path / "gone")
        time.sleep(0.3)
        assert not heartbeat.save_requested
        heartbeat.save_finished()
        (tmp_path / "gone").rename(folder)
        before = Heartbeat.read(folder)["time"]
        wait_until(lambda: Heartbeat.read(folder)["time"] > before)
        folder.rename(tmp_path / "gone")
    assert Heartbeat.read(folder) is None


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_takes_no_files_stops_nothing(tmp_path):
    tmp_path.chmod(0o500)
    with fast(tmp_path) as heartbeat:
        time.sleep(0.2)
        heartbeat.save_finished()
    assert Heartbeat.read(tmp_path) is None
    tmp_path.chmod(0o700)


def test_a_disk_that_takes_no_new_file_still_takes_the_heartbeat(tmp_path):
    with fast(tmp_path) as heartbeat:
        heartbeat.activity = "é" * 240  # longer in the file than what follows
        wait_until(lambda: Heartbeat.read(tmp_path)["doing"] == heartbeat.activity)
        inode = (tmp_path / "heartbeat.json").stat().st_ino
        (tmp_path / "heartbeat.json.partial").mkdir()
        heartbeat.activity = "waiting for disk space"
        wait_until(lambda: (Heartbeat.read(tmp_path) or {}).get("doing") == "waiting for disk space")
        assert (tmp_path / "heartbeat.json").stat().st_ino == inode


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills as POSIX has them")
def test_a_killed_session_is_told_from_one_that_lives(tmp_path):
    body = f"""
        import time
        from pathlib import Path
        from unfog.process.heartbeat import Heartbeat
        from unfog.process.signals import StopSignals
        with Heartbeat(Path({str(tmp_path)!r}), StopSignals(), interval=0.5) as pulse:
            pulse.activity = "training"
            print("ready", flush=True)
            time.sleep(20)
    """
    with python(body) as process:
        assert process.stdout.readline() == "ready\n"
        wait_until(lambda: Heartbeat.read(tmp_path)["doing"] == "training")
        assert Heartbeat.read(tmp_path)["alive"]
        process.kill()
    beat = Heartbeat.read(tmp_path)
    assert not beat["alive"]
    assert beat["doing"] == "training"
    elsewhere = json.loads((tmp_path / "heartbeat.json").read_text()) | {"host": "elsewhere"}
    (tmp_path / "heartbeat.json").write_text(json.dumps(elsewhere))
    wait_until(lambda: not Heartbeat.read(tmp_path)["alive"])  # of a process that cannot be asked for, after a while
    assert Heartbeat.read(tmp_path)["age"] > 3 * 0.5


def test_it_does_not_keep_a_process_alive(tmp_path):
    body = f"""
        from pathlib import Path
        from unfog.process.heartbeat import Heartbeat
        from unfog.process.signals import StopSignals
        pulse = Heartbeat(Path({str(tmp_path)!r}), StopSignals()).__enter__()
    """
    with python(body) as process:
        assert process.wait(60) == 0


def test_it_loads_no_torch():
    with python("import sys, unfog.process.heartbeat; print('torch' in sys.modules)") as process:
        assert process.communicate()[0] == "False\n"


WHOLE = {"pid": 1, "host": "a", "step": 1, "steps": 2, "doing": "training", "next": 5.0}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"time": "2026-01-01T',
        b"\xff\xfe",
        b"[1]",
        b"{}",
        json.dumps({**WHOLE, "time": 5}).encode(),
        json.dumps({**WHOLE, "time": "2026-01-01T00:00:00"}).encode(),
        json.dumps({**WHOLE, "time": "2026-01-01T00:00:00+00:00", "next": "soon"}).encode(),
    ],
)
def test_what_is_no_heartbeat_is_none(tmp_path, content):
    assert Heartbeat.read(tmp_path) is None
    (tmp_path / "heartbeat.json").write_bytes(content)
    assert Heartbeat.read(tmp_path) is None


@pytest.mark.parametrize(("age", "alive"), [(-60, True), (14, True), (16, False)])
def test_three_missed_heartbeats_are_death(tmp_path, age, alive):
    written = (datetime.now(UTC) - timedelta(seconds=age)).isoformat()
    (tmp_path / "heartbeat.json").write_text(json.dumps({**WHOLE, "time": written}))
    beat = Heartbeat.read(tmp_path)
    assert beat["alive"] is alive
    assert beat["age"] == pytest.approx(max(0, age), abs=0.9)


def test_heartbeats_keep_their_size(tmp_path):
    with fast(tmp_path) as heartbeat:
        sizes = set()
        for doing in ("saving", "preview", "ü" * 10):
            heartbeat.activity = doing
            wait_until(lambda: Heartbeat.read(tmp_path)["doing"] == doing)  # noqa: B023
            sizes.add((tmp_path / "heartbeat.json").stat().st_size)
    assert sizes == {module._FILE_BYTES}


def python(body: str, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", dedent(body)], stdout=subprocess.PIPE, text=True, **options)


LIVING = """
    import sys, time
    from pathlib import Path
    from unfog.process.heartbeat import Heartbeat
    from unfog.process.signals import StopSignals
    with Heartbeat(Path({folder!r}), StopSignals(), interval=0.5) as pulse:
        pulse.activity = "training"
        print("ready", flush=True)
        sys.stdin.readline()
        print(pulse.suspended(), flush=True)
"""


def test_a_run_has_a_heartbeat_from_the_moment_that_its_folder_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_POLL_INTERVAL", 60.0)  # the thread of the heartbeat comes too late
    with Heartbeat(tmp_path, StopSignals(), interval=60.0, silent=True) as pulse:
        assert Heartbeat.read(tmp_path) is None
        pulse.begin()
        assert run_state([{"kind": "started"}], Heartbeat.read(tmp_path)) == ("running", "starting")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs the /proc of Linux")
def test_a_suspended_process_stands_still_and_knows_for_how_long(tmp_path):
    with python(LIVING.format(folder=str(tmp_path)), stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        wait_until(lambda: Heartbeat.read(tmp_path)["doing"] == "training")
        assert Heartbeat.read(tmp_path)["still"] == ""
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: Heartbeat.read(tmp_path)["still"])
        time.sleep(2)
        beat = Heartbeat.read(tmp_path)
        assert beat["alive"]
        assert run_state([{"kind": "started"}], beat) == ("standing still", f"process {process.pid} is suspended")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: not Heartbeat.read(tmp_path)["still"])
        process.stdin.write("\n")
        process.stdin.flush()
        assert 1.5 < float(process.stdout.readline()) < 10
    assert not Heartbeat.read(tmp_path)["alive"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs the /proc of Linux")
@pytest.mark.parametrize("hours", [-24, 1])
def test_on_one_machine_clocks_do_not_matter(tmp_path, hours):
    with Heartbeat(tmp_path, StopSignals()):
        beat = json.loads((tmp_path / "heartbeat.json").read_text())
        beat["time"] = (datetime.now(UTC) + timedelta(hours=hours)).isoformat()
        (tmp_path / "heartbeat.json").write_text(json.dumps(beat))
        found = Heartbeat.read(tmp_path)
        assert (found["alive"], found["still"]) == (True, "")
        assert found["age"] < 60
        (tmp_path / "heartbeat.json").write_text(json.dumps(beat | {"started": beat["started"] - 1}))
        assert not Heartbeat.read(tmp_path)["alive"], "another process has the number now"
        (tmp_path / "heartbeat.json").write_text(json.dumps(beat | {"uptime": beat["uptime"] - 100}))
        assert "does not answer" in Heartbeat.read(tmp_path)["still"]
