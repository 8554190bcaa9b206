"""Compare this checkout with an earlier commit, bit for bit: `python scripts/safety_net.py [--base COMMIT]`.

Both versions do the same on this machine, each in processes of its own: a run of 36 steps, one that is killed and
resumed, one on two processes, samples of it, and an evaluation. A run that the earlier version left half-way is resumed
by both. All that they leave (weights, samples, metrics) has to have the same sha256. Hashes are made anew each time, as
they differ between machines. Takes about four minutes on two cores; exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
BASE = "83f8f3f5"  # from which on classes begin with deviation 1; older ones may need packages of their time
NETWORK = "unet:channels=8/16,attention=0/1,mid_attention=0,norm_groups=4,head_channels=8,dropout=0.1"
# Everything that is timed to be chosen is given, so that only the code decides what comes out.
USUAL = {
    "--size": 16, "--batch": 8, "--microbatch": 3, "--steps": 36, "--network": NETWORK, "--precision": "fp32",
    "--device": "cpu", "--flip": True, "--data.jitter": 0.1, "--sampler.steps": 3, "--log.every": 1,
    "--preview.every": 12, "--preview.images": 4, "--evaluate.every": 12, "--evaluate.images": 8,
    "--evaluate.levels": 2, "--evaluate.metrics": "sliced", "--evaluate.samples": 16, "--evaluate.reference": 32,
    "--evaluate.metrics-every": 12, "--checkpoint.every": 6, "--checkpoint.keep": 100,
    "--data.held-out": 0.1, "--averages.every": 6,
}  # fmt: skip
VARIANTS: dict[str, dict[str, object]] = {
    "run": {},
    # Eight steps, as in fewer Heun's explode from EDM's first level, which is refused.
    "edm": {"--preset": "edm", "--network": "mpunet:channels=8/16,attention=0/1", "--optimizer": "muon",
            "--sampler.steps": 8},
    "flow": {"--network": "dit:width=32,depth=2,head_channels=8,patch=2", "--path": "flow", "--schedule": "logitnormal",
             "--target": "flow", "--weighting": "plain", "--data.augment": 0.2},
}  # fmt: skip
CLOCK = ("seconds", "images_per_second", "data_wait", "time", "memory", "disk_free")


class Version:
    """A checkout of Unfog and the folder in which it works."""

    def __init__(self, name: str, code: Path, work: Path, images: Path):
        self.name, self.work, self.images = name, work / name, images
        self.work.mkdir()
        self.environment = os.environ | {
            "PYTHONPATH": str(code / "src"),
            "UNFOG_CACHE": str(self.work / "cache"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
        }

    def start(self, *words: object, processes: int = 1) -> subprocess.Popen[bytes]:
        """Start `unfog WORDS`, by torchrun if there are several processes."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *(torchrun if processes > 1 else []), "-m", "unfog", *map(str, words)]
        log = (self.work / "log.txt").open("ab")
        return subprocess.Popen(command, env=self.environment, cwd=self.work, stdout=log, stderr=log)

    def call(self, *words: object, processes: int = 1) -> None:
        """Run `unfog WORDS` to its end."""
        if status := self.start(*words, processes=processes).wait():
            self._fail(f"unfog {' '.join(map(str, words))} ended with {status}")

    def training(self, out: str, variant: str = "run") -> list[object]:
        """Words of a training command."""
        flags = USUAL | VARIANTS[variant]
        words = [[flag] if value is True else [flag, value] for flag, value in flags.items()]
        return ["train", self.images, "--out", self.work / out, *(word for pair in words for word in pair)]

    def train_and_kill(self, out: str, step: int) -> None:
        """Train, and kill the process once a checkpoint of `step` is there."""
        process = self.start(*self.training(out))
        while not (self.work / out / "checkpoints" / f"{step:08}" / "manifest.json").exists():
            if process.poll() is not None:
                self._fail("training ended before it could be killed")
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def _fail(self, reason: str) -> NoReturn:
        """End with the reason and the last lines of what the commands printed."""
        raise SystemExit(f"{self.name}: {reason}\n{(self.work / 'log.txt').read_text()[-3000:]}")


def make_images(folder: Path) -> None:
    """Write 120 small images in three classes, always the same."""
    generator = np.random.default_rng(7)
    for i in range(120):
        place = folder / "abc"[i % 3]
        place.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (4, 4 + i % 3, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((24 + i, 40), Image.Resampling.BICUBIC).save(place / f"{i:03}.png")


def sha256(data: bytes) -> str:
    """Short digest for the table."""
    return hashlib.sha256(data).hexdigest()[:16]


def rows_without_clock(file: Path) -> bytes:
    """The metrics of a run, less what a clock measured."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return json.dumps(
        [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in rows], sort_keys=True
    ).encode()


def result_of(run: Path) -> dict[str, str]:
    """Digests of what a run left: weights, optimiser, previews and metrics."""
    newest = max((run / "checkpoints").glob("[0-9]*"))
    files = {f.name: sha256(f.read_bytes()) for f in sorted(newest.glob("*.safetensors"))}
    # By pixels: later versions write a mark into each picture.
    previews = {f.name: sha256(np.asarray(Image.open(f)).tobytes()) for f in sorted((run / "samples").glob("*.png"))}
    return files | previews | {"step": newest.name, "metrics": sha256(rows_without_clock(run / "metrics.jsonl"))}


def evaluation_of(run: Path) -> dict[str, str]:
    """Digests of the numbers that an evaluation stored."""
    found = {}
    for file in sorted((run / "evaluations").glob("*.json")):
        for one in json.loads(file.read_text())["measured"]:
            numbers = [one[name] for name in ("value", "low", "high", "n", "n_reference")]
            found[one["metric"]] = sha256(json.dumps(numbers).encode())
    return found


def samples_of(folder: Path) -> dict[str, str]:
    """Digests of the pixels of a run's samples by number; later versions name the class, too, and caption the grid."""
    files = sorted(folder.glob("[0-9]*.png"))
    return {f"sample {f.stem[:6]}": sha256(np.asarray(Image.open(f)).tobytes()) for f in files}


def work_through(version: Version, half_way: Path) -> dict[str, dict[str, str]]:
    """Do everything that is compared; returns digests by case."""
    work, found = version.work, {}
    for name in VARIANTS:
        version.call(*version.training(name, name))
        found[name] = result_of(work / name)
    version.train_and_kill("killed", step=12)
    version.call("resume", work / "killed")
    found["killed and resumed"] = result_of(work / "killed")
    version.call(*version.training("two"), processes=2)
    found["two processes"] = result_of(work / "two")
    version.call("sample", work / "run", "-n", 5, "--steps", 4, "--out", work / "samples", "--guidance", 1.5)
    found["samples"] = samples_of(work / "samples")
    version.call("evaluate", work / "run", "-n", 32, "--metrics", "sliced,held_out,kid", "--features", "texture")
    found["evaluation"] = evaluation_of(work / "run")
    shutil.copytree(half_way, work / "half-way")
    version.call("resume", work / "half-way", "--source", version.images)  # they lie elsewhere by now
    found["resumed from the base's checkpoint"] = result_of(work / "half-way")
    return found


def check_out(commit: str, place: Path) -> Path:
    """Write the files of a commit into a folder."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(place, filter="data")
    return place


def report(base: dict[str, dict[str, str]], here: dict[str, dict[str, str]]) -> int:
    """Print a line for each case; returns the number of cases that differ."""
    bad = 0
    for case, expected in base.items():
        different = [name for name in expected.keys() | here[case].keys() if expected.get(name) != here[case].get(name)]
        bad += bool(different)
        verdict, what = (
            ("DIFFERS", ", ".join(sorted(different))) if different else ("same   ", f"{len(expected)} digests")
        )
        print(f"{verdict} {case}: {what}")
    alike = (
        ("killed and resumed", "run"),
        ("resumed from the base's checkpoint", "run"),
    )
    for case, other in alike:
        weights = [name for name in here[other] if name.endswith(".safetensors")]
        if any(here[case][name] != here[other][name] for name in weights):
            bad += 1
            print(f"DIFFERS {case}: its weights are not those of the run that was never stopped")
    return bad


def main() -> None:
    """Compare, and exit with 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=BASE, help="commit to compare with")
    parser.add_argument("--keep", type=Path, help="folder for digests of the base, so that they are computed only once")
    asked = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        make_images(place / "images")
        stored = asked.keep / "base.json" if asked.keep else None
        if stored and stored.exists():
            base = json.loads(stored.read_text())
            shutil.copytree(asked.keep / "half-way", place / "half-way")
            shutil.copytree(asked.keep / "images", place / "images", dirs_exist_ok=True)
        else:
            old = Version("base", check_out(asked.base, place / "code"), place, place / "images")
            old.train_and_kill("half-way", step=18)
            shutil.move(old.work / "half-way", place / "half-way")
            base = work_through(old, place / "half-way")
            if stored:
                asked.keep.mkdir(parents=True)
                stored.write_text(json.dumps(base, indent=1))
                shutil.copytree(place / "half-way", asked.keep / "half-way")
                shutil.copytree(place / "images", asked.keep / "images")
        bad = report(base, work_through(Version("here", ROOT, place, place / "images"), place / "half-way"))
    print(f"{bad or 'no'} difference(s) from {asked.base}, in {time.monotonic() - started:.0f} s")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
