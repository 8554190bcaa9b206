"""Progress: a live line on a terminal, plain lines without control characters elsewhere."""

import math
import os
import pty
import re
import subprocess
import sys

import pytest

from unfog.reporting.progress import Progress, Rate, format_duration, format_number

SCRIPT = """
import time
from pathlib import Path
from unfog.reporting import progress
from unfog.reporting.progress import Progress, print_result, say, warn
say("scan [bold]photos[/bold]: 500 pictures")
with Progress("step", 40, delay=0.0) as bar:
    for step in range(1, 41):
        time.sleep(0.02)
        bar.update(step, f"loss {1 / step:.3f}" if step % 10 == 0 else "")
        if step == 20:
            warn("bad name \\x1b[31m\\udcff")
            with Progress("sampling", 8, delay=0.1) as inner:
                for i in range(8):
                    time.sleep(0.05)
                    inner.update(i + 1)
with Progress("short", 3) as bar:
    bar.update(3)
print_result("runs/photos")
"""
ENVIRONMENT = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}


@pytest.mark.slow
def test_piped_output_is_plain_lines():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, env=ENVIRONMENT, check=True)
    assert done.stdout == b"runs/photos\n"
    text = done.stderr.decode()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    lines = text.splitlines()
    assert lines[0] == "scan [bold]photos[/bold]: 500 pictures"
    assert lines[1].startswith("step 1/40")
    assert lines[2] == "warning: bad name \N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}"
    assert re.match(r"sampling [2-5]/8 · ", lines[3])
    assert re.search(r"/s · \d s left · \d s so far$", lines[3])
    assert lines[4].startswith("sampling 8/8")
    assert lines[5].startswith("step 40/40 · loss 0.025")
    assert len(lines) == 6  # first and last; nothing between within five seconds, and no trace of the short one


@pytest.mark.slow
def test_a_terminal_shows_a_live_line_and_gets_its_cursor_back():
    main, side = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=side, stdin=side, env=ENVIRONMENT
    )
    os.close(side)
    seen = b""
    while True:
        try:
            data = os.read(main, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not data:
            break
        seen += data
    assert child.wait() == 0
    assert child.stdout.read() == b"runs/photos\n"
    text = seen.decode()
    assert "\x1b[?25l" in text  # cursor hidden while the line lives
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.count("\x1b[2K") >= 3  # drawn over
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "scan [bold]photos[/bold]: 500 pictures" in plain
    assert re.search(r"step ━.* 2\d/40 [56]\d% · loss 0.050 · \d s left", plain)
    assert "sampling ━" in plain
    assert "short" not in plain
    assert "\x1b[31m" not in text.split("bad name")[1][:12]


@pytest.mark.slow
def test_plain_lines_come_at_most_every_few_seconds(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress("step", 100_000, delay=0.0) as bar:
        for step in range(1, 100_001):
            now[0] += 0.36  # ten hours
            bar.update(step, f"loss {step}")
    lines = capsys.readouterr().err.splitlines()
    assert 500 < len(lines) < 1000
    assert lines[0].startswith("step 1/100,000 · loss 1 · ")
    assert lines[-1].startswith("step 100,000/100,000 · loss 100000")
    middle = lines[len(lines) // 2]
    done = int(re.search(r"step ([\d,]+)/", middle)[1].replace(",", ""))
    assert f"{format_duration((100_000 - done) * 0.36)} left" in middle


def test_short_work_leaves_no_trace(capsys):
    with Progress("decoding", 10) as bar:
        for i in range(10):
            bar.update(i + 1)
    assert capsys.readouterr().err == ""


def test_one_step_says_nothing_of_the_time_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bar = Progress("step", 40, start=10, delay=1000)
    said = []
    for step, second in ((11, 17.0), (12, 18.0)):
        now[0] = second
        bar.update(step)
        said.append(bar.time_left())
    assert said[0] == ""
    assert said[1].endswith(" left")


def test_progress_without_an_end_has_no_time_left(capsys):
    with Progress("reading", None, delay=0.0) as bar:
        bar.update(12)
        bar.update(12345)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("reading 12,345 · ")
    assert "left" not in "".join(lines)


def test_pace_is_exact_for_steady_work_and_follows_a_change():
    pace = Rate(1000, 0.0)
    assert math.isnan(pace.rate)
    for second in range(1, 101):
        pace.update(1000 + 5 * second, float(second))
        assert pace.rate == pytest.approx(5)
    for second in range(101, 201):
        pace.update(1500 + 10 * (second - 100), float(second))
    assert 8.5 < pace.rate < 10
    pace.update(1000, 201.0)  # gone back to a checkpoint: slower, never negative
    assert 8 < pace.rate < 10


def test_pauses_count_in_the_time_left():
    pace, now, done = Rate(0, 0.0), 0.0, 0
    for i in range(1, 2001):
        now, done = now + 1 + (50 if i % 100 == 0 else 0), done + 1
        pace.update(done, now)
    assert 1 / pace.rate == pytest.approx(1.5, rel=0.15)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (18_120, "5 h 02 min"),
        (187_200, "2 d 04 h"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_durations_read_as_people_say_them(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0.012345, "0.0123"), (4.5678, "4.57"), (5210.4, "5,210")])
def test_amounts(value, text):
    assert format_number(value) == text
