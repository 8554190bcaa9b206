"""Part: the commands of a person, each a process of its own, on a small set of drawings that are made here."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from parts import Setting
from photos import draw_photos
from rows import Row

TINY = "unet:channels=32/32,attention=0/1"


def measure(setting: Setting) -> Iterator[Row]:
    """Yield a row for each command: its seconds, or its last line where it ends with another status than 0."""
    device = ("--device", setting.device)
    photos, run, codec = draw_photos(setting.folder / "photos"), setting.folder / "run", setting.folder / "codec"
    # Evaluated and drawn at the start and at the end alone, which costs more than the steps.
    seldom = ("--preview.every", "8", "--preview.images", "1", "--evaluate.every", "8")
    small = ("--batch", "8", "--steps", "8", "--sampler.steps", "2", *seldom, *device)
    commands = {
        "train": (
            *("train", photos, "--out", run, "--network", TINY, "--size", "16", *small),
            *("--checkpoint.every", "4", "--data.held-out", "0.2", "--ema-snapshots.every", "-1"),
        ),
        "resume --verify": ("resume", run, "--verify"),
        "sample": ("sample", run, "-n", "4", "--steps", "4", "--precision", "bf16", *device),
        "evaluate": ("evaluate", run, "--metrics", "fid,kid,held_out", "-n", "24", "--features", "texture", *device),
        "train-autoencoder": (
            *("train-autoencoder", photos, "--out", codec, "--size", "16", "--width", "tiny", "--factor", "4"),
            *("--steps", "4", "--batch", "4", *seldom, *device),
        ),
        "train --autoencoder": (
            *("train", photos, "--out", setting.folder / "latent", "--autoencoder", codec, "--network"),
            *("dit:width=32,depth=1,head_channels=16", *small),
        ),
    }
    for name, words in commands.items():
        yield call(name, [str(word) for word in words])


def call(name: str, words: list[str]) -> Row:
    """Run a command, whose output goes to the log."""
    started = time.perf_counter()
    process = subprocess.run([sys.executable, "-m", "unfog", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    seconds, said = time.perf_counter() - started, process.stdout.decode(errors="replace")
    print(f"unfog {' '.join(words)}\n{said}", flush=True)
    lines = [line for line in said.splitlines() if line.strip()] or ["nothing"]
    failed = f"status {process.returncode}: {lines[-1]}"[:300]
    good = process.returncode == 0
    return Row(
        "commands", name, f"{seconds:.1f} s" if good else failed, "ok" if good else "failed", {"seconds": seconds}
    )
