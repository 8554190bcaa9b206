"""Train CIFAR-10 in slices of minutes, draw 50,000 samples, and compute the FID: repeat the command until it is there.

    python benchmarks/gpu/cifar10.py STATE --source CIFAR10/train [--fid FILE] [--minutes 9] [--cpu]

STATE is the folder that keeps the run between the calls. The source has to be at the same place each time. FILE is the
TorchScript file of the FID network (docs/metrics.md). `--cpu` rehearses with a tiny network, images that are made here,
and features that need no file.

Exit status: 0 when the FID is there, 3 when another call is needed, 1 when something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

IMAGES = 16_000_000
"""Training images, a tenth of what EDM trains on: by the estimate of README.md 35 to 60 minutes on an H100."""
RECIPE = (
    *("--network", "cifar10", "--size", "32", "--batch", "512", "--data.flip", "--data.labels", "none"),
    *("--compile", "--training.capture"),
)
TINY = ("--network", "unet:channels=32/32,attention=0/0,mid_attention=0", "--size", "16", "--batch", "16")
QUIET = ("--data.held-out", "0", "--evaluate.every", "-1", "--preview.every", "-1", "--checkpoint.keep", "1")
NO_SNAPSHOTS = ("--ema-snapshots.every", "-1")
_SAVING = 20.0  # seconds for the last checkpoint
_SAVED = 3  # exit status of a run that was stopped and saved


def main(arguments: list[str]) -> int:
    """Do one slice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path)
    parser.add_argument("--source", default="", help="folder of the 50,000 training images, or a file .npz")
    parser.add_argument("--fid", default="", help="file of the FID network; without it, the texture features are used")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args(arguments)
    if not (given.source or given.cpu):
        parser.error("--source is missing")
    deadline = time.monotonic() + 60 * given.minutes - (_SAVING if not given.cpu else 0)
    given.state.mkdir(parents=True, exist_ok=True)
    return slice_of(given, given.state, deadline)


def slice_of(given: argparse.Namespace, state: Path, deadline: float) -> int:
    """Train until the end or the deadline; then draw and measure. Return the exit status."""
    run, source = state / "run", given.source or made_images(state / "images.npz")
    device = ("--device", "cpu" if given.cpu else "cuda")
    if not (state / "trained").exists():
        images = given.images or (160 if given.cpu else IMAGES)
        begin = ["train", source, "--out", str(run), "--images", str(images), *device, *QUIET, *NO_SNAPSHOTS]
        resume = ["resume", str(run), "--source", source]
        status = within(resume if run.exists() else [*begin, *(TINY if given.cpu else RECIPE)], deadline)
        if status:
            return status
        (state / "trained").write_text("")
    samples, features = str(given.samples or (128 if given.cpu else 50_000)), given.fid or "texture"
    measure = ["evaluate", str(run), "--metrics", "fid", "-n", samples, "--features", features, "--reference", source]
    measure += ["--batch", "16" if given.cpu else "500", "--precision", "bf16"]
    status = within([*measure, *device], deadline)
    if status == 0:
        print(describe(measured(run)))
    return status


def within(words: list[str], deadline: float) -> int:
    """Run a command of Unfog until the deadline, then stop it as a person does: it saves, and can be continued."""
    print("unfog", *words, flush=True)
    process = subprocess.Popen([sys.executable, "-m", "unfog", *words], env=os.environ)
    try:
        status = process.wait(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        status = process.wait()
        # 130: stopped while drawing, where every sample so far is kept.
        return _SAVED if status in (_SAVED, 130, -signal.SIGTERM) else 1
    return status if status in (0, _SAVED) else 1


def measured(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of the newest evaluation of a run."""
    results = sorted((run / "evaluations").glob("*.json"), key=lambda path: path.stat().st_mtime)
    found: list[dict[str, Any]] = json.loads(results[-1].read_text())["measured"] if results else []
    return found


def describe(metrics: list[dict[str, Any]]) -> str:
    """Return the values of metrics with their intervals; "?" for what so few samples do not give."""
    words = []
    for m in metrics:
        value, low, high = (f"{m[name]:.4g}" if m[name] is not None else "?" for name in ("value", "low", "high"))
        words.append(f"{m['metric']} {value} [{low}, {high}], {m['n']:,} samples")
    return "; ".join(words)


def made_images(file: Path) -> str:
    """Write 300 images of bright squares on noise, for the rehearsal."""
    import numpy as np

    rng = np.random.default_rng(0)
    images = rng.integers(0, 120, (300, 16, 16, 3), dtype=np.uint8)
    for image, (y, x) in zip(images, rng.integers(0, 8, (300, 2))):
        image[y : y + 8, x : x + 8] = 230
    if not file.exists():
        np.savez(file, images=images)
    return str(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
