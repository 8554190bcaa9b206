"""Train with a mirror, lose the run, continue from the mirror, and draw what was where, when:

    python scripts/pages/draw_mirror.py FOLDER

works in FOLDER, which must not exist, and writes docs/pictures/mirror.svg. The run is killed by SIGKILL, and its folder
deleted, as if its machine were gone.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from line_charts import BLUE, GREEN, ORANGE, RED, Chart, Points, side_by_side

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "mirror.svg"
EVERY, LOST, STEPS = 100, 370, 600  # steps between checkpoints, at the loss, and of the run
NETWORK = "unet:channels=8,attention=0,mid_attention=0,norm_groups=4"


@dataclass
class Record:
    """When each step was logged, and each checkpoint was first whole in the run and in its mirror."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    saved: dict[int, float] = field(default_factory=dict)
    mirrored: dict[int, float] = field(default_factory=dict)

    def look(self, run: Path, mirror: Path, now: float) -> float:
        """Note what is new, and return the newest step."""
        for folder, seen in ((run, self.saved), (mirror, self.mirrored)):
            for path in folder.glob("checkpoints/[0-9]*/manifest.json"):
                seen.setdefault(int(path.parent.name), now)
        log = run / "metrics.jsonl"
        lines = log.read_text("utf-8").rpartition("\n")[0].splitlines() if log.exists() else []
        step = json.loads(lines[-1])["step"] if lines else 0
        if not self.steps or step != self.steps[-1][1]:
            self.steps.append((now, step))
        return float(step)


def unfog(*words: str | Path) -> subprocess.Popen[bytes]:
    """Start a command."""
    return subprocess.Popen([sys.executable, "-m", "unfog", *map(str, words)])


def record(folder: Path) -> tuple[Record, Record]:
    """Return what was seen before the loss, and after it. Times are seconds from the beginning."""
    folder.mkdir(parents=True)
    run, mirror, start = folder / "run", folder / "mirror", time.monotonic()
    words = ["--network", NETWORK, "--batch", "8", "--steps", str(STEPS), "--checkpoint.every", str(EVERY)]
    words += ["--log.every", "5", "--preview.every", "-1", "--evaluate.every", "-1", "--mirror", str(mirror)]
    before, after = Record(), Record()
    process = unfog("train", "fashion", "--out", run, *words)
    while before.look(run, mirror, time.monotonic() - start) < LOST:
        if process.poll() is not None:
            raise SystemExit("the run ended before it was to be lost")
        time.sleep(0.02)
    process.kill()
    process.wait()
    shutil.rmtree(run)
    shutil.copytree(mirror, run)
    process = unfog("resume", run)
    while process.poll() is None:
        after.look(run, mirror, time.monotonic() - start)
        time.sleep(0.02)
    after.look(run, mirror, time.monotonic() - start)
    if process.returncode:
        raise SystemExit("the run did not go on from its mirror")
    return before, after


def draw(before: Record, after: Record) -> str:
    """Return the picture."""
    begin = min(before.saved.values())
    kept, lost = max(before.mirrored), int(before.steps[-1][1])
    first: Points = [(t - begin, step) for t, step in before.steps if t >= begin]
    again = [(t - begin, step) for t, step in after.steps if step > kept]
    end, gone = again[-1][0], first[-1][0]
    tick = max(5, round(end / 50) * 10)
    chart = Chart(
        f"A run with a checkpoint every {EVERY} steps, and its mirror",
        range(0, int(end) + tick, tick),
        range(0, STEPS + 1, EVERY),
        ("seconds", "step"),
        (720, 360),
    )
    chart.band(gone, again[0][0], RED)
    chart.curve(first, BLUE)
    chart.curve(again, BLUE)
    chart.curve([(gone, lost), (gone, kept)], RED, dashed=True)
    for record in (before, after):
        old = 0 if record is before else kept
        chart.dots([(t - begin, step) for step, t in record.saved.items() if step > old], BLUE)
        chart.dots([(t - begin, step - 18) for step, t in record.mirrored.items() if step > old], GREEN)
    chart.note(0.04 * end, STEPS - 35, "● checkpoint in the run", BLUE)
    chart.note(0.04 * end, STEPS - 80, "● the same in the mirror", GREEN)
    middle = (gone + again[0][0]) / 2
    chart.note(middle, lost + 105, "machine lost,", RED, "middle")
    chart.note(middle, lost + 70, "run copied back", RED, "middle")
    chart.note(gone + 0.02 * end, kept - 35, f"steps {kept} to {lost} again", ORANGE)
    return side_by_side(
        f"A run is lost at step {lost}, and goes on from step {kept}, the newest in its mirror", [chart]
    )


def main(folder: Path) -> None:
    PICTURE.write_text(draw(*record(folder)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
