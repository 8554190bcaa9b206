"""Part: every command on the device, on a small set of drawings that are made here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from unfog.cli.main import main

import numpy as np
from parts import Setting, missing
from PIL import Image
from rows import Row

COUNT = 128  # drawings: some are held out
# Other statuses of commands that have done their work: so few drawings are no set to train on, or to find a rate with.
VERDICTS = {"doctor": 2, "find-lr": 1}
TINY = "unet:channels=32/32,attention=0/1"


def measure(setting: Setting) -> Iterator[Row]:
    """Yield a row for each command: its seconds, or its last line where it ends with another status than 0."""
    photos, run, device = draw_photos(setting.folder / "photos"), setting.folder / "run", ("--device", setting.device)
    small = ("--network", TINY, "--size", "16", "--batch", "8", *device)
    short = ("--steps", "12", "--sampler.steps", "2", "--preview.images", "4", "--checkpoint.every", "6")
    kept = ("--data.held-out", "0.2", "--ema-snapshots.every", "3")
    commands = {
        "plan": ("plan", photos, *small, *short),
        "find-lr": ("find-lr", photos, "--out", setting.folder / "lr", "--seconds", "4", *small),
        "pack": ("pack", photos, setting.folder / "pack", "--data.size", "16"),
        "train": ("train", photos, "--out", run, *small, *short, *kept),
        "resume --verify": ("resume", run, "--verify"),
        "resume": ("resume", run, "--steps", "18"),
        "sample": ("sample", run, "-n", "4", "--steps", "4", *device),
        "sample --precision bf16": ("sample", run, "-n", "4", "--steps", "4", "--precision", "bf16", *device),
        "evaluate": ("evaluate", run, "--metrics", "fid,kid,held_out", "-n", "24", "--features", "texture", *device),
        "ema-sweep": ("ema-sweep", run, *device),
        "report": ("report", run),
        "export": ("export", run, setting.folder / "safetensors"),
        "train-autoencoder": (
            *("train-autoencoder", photos, "--out", setting.folder / "ae", "--size", "32", "--width", "tiny"),
            *("--factor", "4", "--steps", "4", "--batch", "4", *device),
        ),
        "train --autoencoder": (
            *("train", photos, "--out", setting.folder / "latent", "--autoencoder", setting.folder / "ae"),
            *("--network", "dit:width=64,depth=2", "--steps", "4", "--batch", "4", "--sampler.steps", "2", *device),
        ),
    }
    if not missing(["diffusers"]):
        commands["export diffusers"] = ("export", run, setting.folder / "diffusers", "--format", "diffusers")
    # Last, as it takes longest.
    commands["doctor"] = (
        "doctor",
        photos,
        "--out",
        setting.folder / "doctor",
        *["--quick"] * setting.cpu,
        *small,
        *short,
    )
    for name, words in commands.items():
        yield call(name, [str(word) for word in words])


def call(name: str, words: list[str]) -> Row:
    """Run a command in this process, which spares it the import of torch."""
    said, started = StringIO(), time.perf_counter()
    status: object = "no exit"
    try:
        with redirect_stderr(said), redirect_stdout(said):
            main(words)
    except SystemExit as left:
        status = left.code
    seconds = time.perf_counter() - started
    print(said.getvalue())  # for the log
    good = status in (0, None, VERDICTS.get(words[0], 0))
    lines = [line for line in said.getvalue().splitlines() if line.strip()] or ["nothing"]
    ended = f"status {status}: {lines[-1]}"[:300]
    result, state = (f"{seconds:.1f} s", "ok") if good else (ended, "failed")
    return Row("commands", name, result, state, {"seconds": seconds})


def draw_photos(folder: Path) -> Path:
    """Write the images of two classes: bright and dark squares on noise."""
    rng = np.random.default_rng(0)
    for i in range(COUNT):
        pixels, kind = rng.integers(0, 120, (32, 32, 3)), ("bright", "dark")[i % 2]
        x, y = rng.integers(0, 16, 2)
        pixels[y : y + 14, x : x + 14] = 230 if kind == "bright" else 20
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / kind / f"{i:03}.png")
    return folder
