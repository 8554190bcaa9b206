"""The display of a run on a real terminal: one set of live lines, which disappears, and messages that stay whole."""

import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from conftest import TRANSFORMER
from terminal import Terminal

RUN = """
import sys, time
from pathlib import Path
from unfog.process.signals import StopSignals
from unfog.reporting.progress import print_result, say
from unfog.reporting.recorder import Recorder
from unfog.reporting.log_settings import Log
folder = Path(sys.argv[1])
with StopSignals() as stop, Recorder(folder, Log(every=1), 40) as recorder:
    say("training 0.05M parameters")
    recorder.progress.show("evaluation")
    recorder.log(0, 0, held_out_loss=1.25)
    time.sleep(0.2)
    recorder.progress.restart()
    recorder.progress.show("training")
    for step in range(1, 41):
        time.sleep(0.02)
        recorder.progress.total = 40 if step < 20 else 80
        recorder.update_progress(step)
        recorder.log(step, step * 8, loss=1 / step, images_per_second=412.0)
        if step == 25 and "wait" in sys.argv:
            recorder.progress.show("waiting")
            input()
        if step == 30:
            say("a message in the middle")
say("finished at step 40")
print_result(str(folder))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return "runs/photos"


@pytest.mark.parametrize("size", [(80, 24), (40, 24), (100, 4)])
@pytest.mark.slow
def test_only_messages_and_results_are_left_on_the_terminal(folder, size):
    with Terminal([sys.executable, "-c", RUN, folder], *size) as terminal:
        assert terminal.finish() == 0, "\n".join(terminal.lines())
    assert [line for line in terminal.lines() if line] == [
        "training 0.05M parameters",
        "a message in the middle",
        "finished at step 40",
        folder,
    ]


@pytest.mark.slow
def test_the_live_lines_show_what_happens_where_and_how_long(folder):
    with Terminal([sys.executable, "-c", RUN, folder]) as terminal:
        assert terminal.finish() == 0, "\n".join(terminal.lines())
    frames = ["\n".join(frame) for frame in terminal.frames]
    assert any(re.search(r"evaluation ━+ step 0/40 0%", frame) for frame in frames)
    assert any(re.search(r"training ━+ step 1\d/40 \d\d% · \d s left · \d s so far", frame) for frame in frames)
    assert any(re.search(r"training ━+ step [23]\d/80 \d\d% · \d s left", frame) for frame in frames)
    assert any(re.search(r"loss 0\.0\d+, falling, held-out 1\.25, 412 images/s", frame) for frame in frames)
    assert any("samples runs/photos/samples · report runs/photos/report.html" in frame for frame in frames)
    assert max(frame.count("━ step") for frame in frames) == 1


@pytest.mark.slow
def test_the_message_of_a_signal_stays_whole(folder):
    with Terminal([sys.executable, "-c", RUN, folder, "wait"]) as terminal:
        terminal.wait_for("waiting")
        terminal.press(b"\x03")
        terminal.wait_for("Press Ctrl-C again")
        terminal.press(b"\n")
        assert terminal.finish() == 0, "\n".join(terminal.lines())
    lines = [line for line in terminal.lines() if line]
    assert len(lines) == 5
    assert lines[1].startswith("Stopping and saving.")
    assert lines[2:] == ["a message in the middle", "finished at step 40", folder]


@pytest.mark.slow
def test_elsewhere_there_are_plain_lines(folder):
    words = [sys.executable, "-c", RUN, folder]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"{folder}\n"
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f━]", done.stderr)
    assert "training" not in done.stderr.splitlines()[1]


@pytest.mark.slow
def test_a_run_on_a_terminal_from_its_start_to_ctrl_c(folder, tmp_path):
    for number in range(40):
        pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 3), np.uint8)
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    words = ["train", "photos", "--out", folder, "--data.size", 8, "--batch", 4, "--steps", 100_000, "--device", "cpu"]
    words += ["--evaluate.every", 50, "--log.every", 5, "--sampler.steps", 2, "--precision", "fp32", "--lr", "1e-3"]
    words += ["--data.held-out", "0.2", "--network", TRANSFORMER]
    with Terminal([sys.executable, "-m", "unfog", *words], columns=100) as terminal:
        terminal.wait_for("images/s")
        terminal.press(b"\x03")
        assert terminal.finish() == 3  # stopped, and resumable
    lines = terminal.lines()
    assert max("\n".join(frame).count("━ step") for frame in terminal.frames) == 1
    assert not any("━" in line or "so far" in line for line in lines)
    assert any(line.startswith("Stopping and saving.") for line in lines)
    assert any(line == folder for line in lines)
