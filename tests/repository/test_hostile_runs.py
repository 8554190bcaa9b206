"""A run of a stranger: no command waits for, follows or loses a file by what stands under any of its names."""

import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import forked
import unfog
from conftest import TRANSFORMER
from hostile import KINDS, plant, snapshot

pytestmark = pytest.mark.slow

SETTINGS = {
    "network": TRANSFORMER, "precision": "fp32", "device": "cpu", "batch": 8, "size": 8, "lr": 3e-3,
    "log": {"every": 4}, "preview": {"every": 8, "images": 2}, "sampler": {"steps": 2}, "averages": {"every": 2},
    "evaluate": {"every": 8, "images": 16, "levels": 2}, "checkpoint": {"every": 8},
}  # fmt: skip
SECONDS = 60  # of the processor, and seconds without using it, in which every command ends
COMMANDS = {
    "report": ("report", "RUN"),
    "resume": ("resume", "RUN", "--steps", "20"),
    "sample": ("sample", "RUN", "-n", "2"),
    "doctor": ("doctor", "RUN"),
    "ema-sweep": ("ema-sweep", "RUN", "--widths", "0.05", "0.1"),
    "evaluate": ("evaluate", "RUN", "--n", "16", "--metrics", "held_out"),
    "verify": ("resume", "RUN", "--verify"),
    "tune": ("tune", "RUN", "--steps", "2", "--pictures", "2", "--tries", "1"),
    "export": ("export", "RUN", "OUT"),
    "diffusers": ("export", "RUN", "OUT", "--format", "diffusers"),
    "runs": ("runs", "RUN"),
    "remove-broken": ("runs", "RUN", "--remove-broken"),
    "watch": ("watch", "RUN", "--once"),
    "guided": ("sample", "RUN", "-n", "2", "--guide", "RUN"),
    "init": ("train", "IMAGES", "--init", "RUN", "--config", "RUN/config.toml", "--out", "OUT", "--steps", "2"),
}
PARTIAL = ("report.html", "config.toml", "heartbeat.json", "data.json", "contact-sheet.png", "samples/00000020.png")
MADE_LATER = [
    *(f"{name}.partial" for name in PARTIAL),
    ".lock", "SAVE", "STOP", "launch", "samples/00000020.png", "doctor", "doctor/findings.json", "evaluations",
    "pictures", "codec", ".codec-partial", ".codec-old", "tensorboard", "wandb", "mlflow", "comet",
    "ema-sweep.json", "ema-sweep.html",
    "checkpoints/.partial-00000020", "checkpoints/.old-00000008", "checkpoints/00000020",
    "checkpoints/.replaced-00000016", "checkpoints/.broken-00000016",
    "averages/.partial-00000018", "averages/00000018.safetensors",
]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("data")
    np.save(place / "images.npy", np.random.default_rng(0).integers(0, 255, (64, 8, 8), np.uint8))
    unfog.train(place / "images.npy", out=place / "run", steps=16, **SETTINGS)
    return place / "run"


def attack(finished: Path, place: Path, name: str, kind: str, command: str) -> None:
    """Plant something in a copy of a run, run a command, and look what became of the files outside."""
    shutil.copytree(finished, place / "run")
    outside = place / "outside"
    outside.mkdir()
    for victim in ("key", "00000002.safetensors", "00000099.safetensors", "00000099.png", "report.html"):
        (outside / victim).write_text("untouched")
    (outside / "00000004").mkdir()
    (outside / "00000004/manifest.json").write_text("untouched")
    before = snapshot(outside)
    is_folder = (place / "run" / name).is_dir() or "." not in name.removeprefix(".")
    plant(place / "run" / name, kind, outside if is_folder and kind == "link" else outside / "key")
    paths = {"RUN": place / "run", "OUT": place / "out", "IMAGES": finished.with_name("images.npy")}
    words = [re.sub("RUN|OUT|IMAGES", lambda found: str(paths[found[0]]), word) for word in COMMANDS[command]]
    with (place / "stderr").open("w") as stderr:
        status = ended(forked.Forked(words, stdout=subprocess.DEVNULL, stderr=stderr))
    printed = (place / "stderr").read_text()
    said = f"{command} with {name} as a {kind}: {status}\n{printed}"
    assert status is not None, f"it waits, or does not end: {said}"
    assert snapshot(outside) == before, said
    assert "bug in unfog" not in printed, said
    assert "Traceback" not in printed, said
    assert status in (0, 1, 2), said
    shutil.rmtree(place)


def ended(process: forked.Forked) -> int | None:
    """Wait for a process, and return its exit status; None if it waits for something, or computes without end.

    Time of the processor counts, as a busy machine is not a fault of the command.
    """
    used, since = 0.0, time.monotonic()
    with process:
        while process.poll() is None and used < SECONDS and time.monotonic() - since < SECONDS:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            if (now := processor_seconds(process.pid)) > used:
                used, since = now, time.monotonic()
        status = process.poll()
        process.kill()
    return status


def processor_seconds(pid: int) -> float:
    """Return the time of the processor that a process has used; 0 if the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


REPRESENTATIVE = [
    ("report.html.partial", "link", "report"),
    ("metrics.jsonl", "pipe", "report"),
    ("samples/00000016.png", "pipe", "report"),
    ("events.jsonl", "link", "resume"),
    (".lock", "dangling", "resume"),
    ("averages", "link", "resume"),
    ("checkpoints", "link", "resume"),
    ("checkpoints/00000016/state.json", "pipe", "resume"),
]


@pytest.mark.parametrize(("name", "kind", "command"), REPRESENTATIVE)
def test_nothing_planted_in_a_run_is_followed(finished, tmp_path, name, kind, command):
    attack(finished, tmp_path / "attack", name, kind, command)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_planted_under_any_name_is_followed(finished, tmp_path, kind, command):
    if kind == "device" and os.geteuid() != 0:
        pytest.skip("devices are made by root")
    names = sorted({str(path.relative_to(finished)) for path in finished.rglob("*")} | {*MADE_LATER})
    failed = []
    for name in names:
        try:
            attack(finished, tmp_path / "attack", name, kind, command)
        except (AssertionError, pytest.fail.Exception) as error:
            failed.append(str(error).splitlines()[0])
            shutil.rmtree(tmp_path / "attack", ignore_errors=True)
    assert not failed, "\n".join(failed)
