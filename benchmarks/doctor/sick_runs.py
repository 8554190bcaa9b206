"""Does `unfog doctor RUN` see what is wrong with a run, and nothing where nothing is? Trains small real runs, most with
one fault planted, examines each, and prints what was expected against what was found.

    python benchmarks/doctor/sick_runs.py OUT [--data FOLDER ...] [--minutes 1] [--only NAME ...]

Every FOLDER of images is one more healthy run. A run that OUT has already is examined and not trained again. All
pictures are 16x16 and the network has 0.6M parameters; `--minutes` scales the number of steps, 1 being half a minute
to two on one CPU core. Ends with status 1 where a planted fault was missed, or a healthy run was warned of anything.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import unfog
from unfog.checks.run.run_checks import check_run
from unfog.data.stream import ImageStream
from unfog.diffusion.objective import Objective
from unfog.errors import RunError
from unfog.process.run_folder import RunFolder
from unfog.reporting.findings import Finding, write_findings
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import snapshot
from unfog.training.checkpoints.load import read_state, read_tensors
from unfog.training.ema import Ema

import numpy as np
import torch
from PIL import Image

STEPS = 600  # half a minute on one core
NETWORK = "unet:channels=8/24/64,attention=0/0/1,mid_attention=0,norm_groups=8,head_channels=16"
GRAVE = ("fatal", "warning")


@dataclass(frozen=True)
class Case:
    """A run to train, what is planted in it, and the findings of which at least one has to be grave."""

    source: str
    settings: dict[str, Any] = field(default_factory=dict)
    during: Callable[[], AbstractContextManager[None]] = nullcontext
    """Disturbs training."""
    copy_of: str = ""
    """Instead of training: a copy of this run …"""
    after: Callable[[Path], None] = lambda run: None
    """… or what was trained, to which this is done afterwards."""
    expected: frozenset[str] = frozenset()
    """Codes; empty for a healthy run."""


@contextmanager
def replaced(owner: type, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """A method of a class is another one meanwhile, made from it."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def slow_data() -> AbstractContextManager[None]:
    """Every batch takes a while to read."""

    def make(batch: Any) -> Any:
        def slow(self: ImageStream, *arguments: Any) -> Any:
            time.sleep(0.2)
            return batch(self, *arguments)

        return slow

    return replaced(ImageStream, "batch", make)


def disturbed_loss(change: Callable[[int, Any], Any]) -> AbstractContextManager[None]:
    """The loss of the n-th pass is another."""

    def make(call: Any) -> Any:
        passes = 0

        def disturbed(self: Objective, *arguments: Any, **named: Any) -> Any:
            nonlocal passes
            passes += 1
            loss = call(self, *arguments, **named)
            return loss._replace(per_image=loss.per_image * change(passes, loss))

        return disturbed

    return replaced(Objective, "__call__", make)


def not_finite_at_times() -> AbstractContextManager[None]:
    """One pass in forty has no finite loss."""
    return disturbed_loss(lambda n, loss: float("nan") if n % 40 == 39 else 1.0)


def outbursts() -> AbstractContextManager[None]:
    """Twice, thirty passes lose far more than usual."""
    return disturbed_loss(lambda n, loss: 50.0 if n % 200 > 169 else 1.0)


def forgotten_average() -> AbstractContextManager[None]:
    """The average is not updated after a while (huggingface/diffusers, issue 5783)."""

    def make(update: Any) -> Any:
        def forgetful(self: Ema, model: Any, number: int) -> None:
            if number <= 60:
                update(self, model, number)

        return forgetful

    return replaced(Ema, "update", make)


def with_average(run: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the averaged weights in the newest checkpoint, which is whole again afterwards."""
    saved, _ = checkpoint.newest(run / "checkpoints")
    assert saved is not None
    kinds = ("model", "ema", "optimizer")
    tensors = {kind: read_tensors(saved.folder / f"{kind}.safetensors", saved.folder) for kind in kinds}
    tensors = {kind: {name: t.clone() for name, t in named.items()} for kind, named in tensors.items()}
    change(tensors["ema"])
    config, state = (saved.folder / checkpoint.CONFIG).read_text(), read_state(saved.folder)
    taken = snapshot.Snapshot(saved.step, tensors, state, saved.anchor, False, config, saved.made_on, 0.0)
    snapshot.write_checkpoint(taken, run / "checkpoints")


def tint(run: Path) -> None:
    """The first channel of what is drawn comes out too dark: with the flow target, y = eps - x0."""
    with_average(run, lambda weights: weights["conv_out.bias"][:1].add_(0.25))


def deafen(run: Path) -> None:
    """The network answers 0, whatever it is shown."""
    with_average(run, lambda weights: [weights[f"conv_out.{name}"].zero_() for name in ("weight", "bias")])


def kill(run: Path) -> None:
    """What a `kill -9` two hours ago would have left."""
    for name in ("events.jsonl", "metrics.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(lines[: len(lines) * 3 // 4]) + '{"step": 1')
    beat = json.loads((run / "heartbeat.json").read_bytes())
    then = (datetime.now(UTC) - timedelta(hours=2)).isoformat(timespec="milliseconds")
    (run / "heartbeat.json").write_text(json.dumps(beat | {"time": then, "doing": "training", "next": 5.0}))


def few_pictures(folder: Path, count: int) -> str:
    """So many of the built-in pictures, in one folder."""
    if not folder.exists():
        from unfog.data.sources.registry import open_source

        source = open_source("fashion")
        folder.mkdir(parents=True)
        for i in range(count):
            image = source.open(i * 61 % 10_000)
            assert isinstance(image, Image.Image)
            image.convert("L").save(folder / f"{i:03d}.png")
    return str(folder)


def solid_pictures(folder: Path, count: int = 300) -> str:
    """Pictures of one colour each."""
    if not folder.exists():
        folder.mkdir(parents=True)
        random = np.random.default_rng(0)
        for i in range(count):
            colour = tuple(int(c) for c in random.integers(40, 216, 3))
            Image.new("RGB", (16, 16), colour).save(folder / f"{i:03d}.png")
    return str(folder)


def cases(out: Path, folders: list[str], minutes: float) -> dict[str, Case]:
    """All cases by name; copies come after what they are copies of."""
    steps = max(60, round(STEPS * minutes))

    def settings(**more: Any) -> dict[str, Any]:
        return {"size": 16, "network": NETWORK, "batch": 32, "precision": "fp32", "steps": steps, **more}

    fashion = Case("fashion", settings())
    few, some = few_pictures(out / "few", 40), few_pictures(out / "some", 200)
    healthy = {"healthy fashion": fashion}
    healthy |= {f"healthy {Path(folder).name}": Case(folder, settings()) for folder in folders}
    healthy["healthy solid colours"] = Case(solid_pictures(out / "solid"), settings())
    high, low = frozenset(["run.lr_high", "run.not_learning"]), frozenset(["run.lr_low"])
    unstable = frozenset(["run.unstable"])
    copied = "healthy fashion"
    return healthy | {
        "lr x100": Case("fashion", settings(lr=0.3), expected=high),
        "lr x30": Case("fashion", settings(lr=0.1), expected=high),
        "lr /100": Case("fashion", settings(lr=3e-5), expected=low),
        "lr x10000": Case(
            "fashion",
            settings(lr=30.0, training={"rollbacks": 1, "patience": 5}),
            expected=frozenset(["run.state"]),
        ),
        "average forgotten": Case("fashion", settings(), forgotten_average, expected=frozenset(["run.ema_behind"])),
        "memorised": Case(few, settings(steps=2 * steps), expected=frozenset(["run.memorised"])),
        "overfitted": Case(
            some,
            settings(steps=2 * steps, data={"held_out": 0.3}),
            expected=frozenset(["run.overfitting"]),
        ),
        "starved": Case("fashion", settings(steps=steps // 4), slow_data, expected=frozenset(["run.data_wait"])),
        "refused steps": Case("fashion", settings(), not_finite_at_times, expected=unstable),
        "outbursts": Case("fashion", settings(training={"patience": 5}), outbursts, expected=unstable),
        "preview every 2": Case(
            "fashion", settings(steps=300, preview={"every": 2}), expected=frozenset(["run.overhead"])
        ),
        "tinted": Case("", copy_of="healthy solid colours", after=tint, expected=frozenset(["run.tint"])),
        "answers 0": Case(
            "", copy_of=copied, after=deafen, expected=frozenset(["run.blank_samples", "run.ema_behind"])
        ),
        "killed": Case("", copy_of=copied, after=kill, expected=frozenset(["run.state"])),
    }


def train(case: Case, run: Path, out: Path) -> None:
    """The run of a case, unless it is there."""
    if run.exists():
        return
    if case.copy_of:
        shutil.copytree(out / slug(case.copy_of), run)
    else:
        with case.during(), suppress(RunError):
            unfog.train(case.source, out=run, **case.settings)
    case.after(run)


def slug(name: str) -> str:
    """A folder's name."""
    return "".join(c if c.isalnum() else "-" for c in name)


def verdict(case: Case, findings: list[Finding]) -> tuple[str, set[str]]:
    """("right", "MISSED" or "FALSE ALARM", codes of the grave findings)."""
    grave = {finding.code for finding in findings if finding.severity in GRAVE}
    if case.expected:
        return ("right" if grave & case.expected else "MISSED"), grave
    return ("FALSE ALARM" if grave else "right"), grave


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", nargs="*", default=[])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows, wrong = [], 0
    for name, case in cases(arguments.out, arguments.data, arguments.minutes).items():
        if arguments.only and not any(word in name for word in arguments.only):
            continue
        run = arguments.out / slug(name)
        train(case, run, arguments.out)
        started = time.perf_counter()
        findings = check_run(RunFolder(run), "cpu")
        seconds = time.perf_counter() - started
        write_findings(run / "doctor", name, findings)
        word, grave = verdict(case, findings)
        wrong += word != "right"
        hints = sorted(finding.code for finding in findings if finding.severity == "hint")
        rows.append((name, word, ", ".join(sorted(grave)) or "-", ", ".join(hints) or "-", f"{seconds:.0f} s"))
    for row in [("run", "verdict", "warnings", "hints", "examined in"), *rows]:
        print(" | ".join(row))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
