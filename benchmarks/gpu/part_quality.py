"""Part: how good pictures are after five minutes: a run on `fashion`, beside a figure of the ledger for a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cifar10 import describe, measured
from parts import Setting
from rows import Row

_RECIPE = [
    *("--network", "small", "--batch", "256", "--precision", "bf16", "--budget", "5m"),
    *("--compile", "--training.capture"),
]
_TINY = [
    *("--network", "unet:channels=32/32,attention=0/0,mid_attention=0"),
    *("--size", "16", "--batch", "8", "--steps", "4"),
]
_QUIET = ("--preview.every", "-1", "--evaluate.every", "-1")
# Row muon-adamw-kid-2026-11-20 of the ledger: `tiny`, 16,000 images, 300 drawings against 1,000 held out.
_OF_A_CPU = {"texture": "a CPU, 16,000 images of `tiny`: kid 0.14 [0.003, 0.27]"}


def measure(setting: Setting) -> Iterator[Row]:
    """Yield the length of the run, and its distances in texture and in pixels."""
    run, device = setting.folder / "run", ("--device", setting.device)
    recipe, count = (_TINY, "24") if setting.cpu else (_RECIPE, "5000")
    status = _unfog("train", "fashion", "--out", str(run), *recipe, *_QUIET, *device)
    if status:
        yield Row("quality", "train", f"exit status {status}", "failed")
        return
    yield Row("quality", "train", _length(run))
    for features in ("texture", "pixels"):
        words = ("-n", count, "--metrics", "fid,kid", "--features", features, "--precision", "bf16", "--batch", "500")
        status = _unfog("evaluate", str(run), *words, *device)
        found = measured(run) if status == 0 else []
        said = describe(found) + (f"; {_OF_A_CPU[features]}" if features in _OF_A_CPU else "")
        state = "ok" if found else "failed"
        figures = {m["metric"]: m["value"] for m in found}
        yield Row("quality", features, said if found else f"exit status {status}", state, figures)


def _unfog(*words: str) -> int:
    return subprocess.run([sys.executable, "-m", "unfog", *words]).returncode


def _length(run: Path) -> str:
    """Return how many images were trained on, and how fast, by the last line of the log."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(lines) if "images_per_second" in line)
    return f"{last['images']:,} images in {last['step']:,} steps, {last['images_per_second']:,.0f} images/s at the end"
