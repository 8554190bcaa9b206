"""Write docs/terminal.md: what a terminal shows while the real program trains and is stopped.

It runs in a pseudo-terminal, whose output an emulator interprets (`tests/terminal.py`). Takes a minute.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "terminal.md"
sys.path.insert(0, str(ROOT / "tests"))
from terminal import Terminal  # noqa: E402

SIZE = (110, 40)
NETWORK = "unet:channels=16/32,attention=0/1,mid_attention=0,norm_groups=4,head_channels=8"
TRAIN = (
    *("train", "fashion", "--out", "runs/clothes", "--steps", "120", "--batch", "4", "--network", NETWORK),
    *(
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--lr",
        "1e-3",
        "--log.every",
        "5",
        "--sampler.steps",
        "4",
        "--data.held-out",
        "0.01",
    ),
    *("--evaluate.every", "60", "--preview.every", "60", "--preview.images", "20"),
)

LIST = ("runs",)
WATCH = ("watch", "runs/clothes", "--once")


def shown(words: tuple[str, ...]) -> str:
    """Return a command as it is typed."""
    return " ".join(["$ unfog", *(f"'{word}'" if "=" in word else word for word in words)])


def record(words: tuple[str, ...], until: str = "", keys: bytes = b"") -> tuple[list[str], list[str]]:
    """Run a command to its end. Returns the lines at `until`, where `keys` are pressed, and those at the end."""
    with Terminal([sys.executable, "-m", "unfog", *words], *SIZE) as terminal:
        middle = []
        if until:
            terminal.wait_for(until, 400)
            middle = terminal.lines()
            terminal.press(keys) if keys else None
        terminal.finish(600)
        return middle, terminal.lines()


def block(words: tuple[str, ...], lines: list[str]) -> str:
    text = "\n".join([shown(words), *lines]).rstrip()
    return f"```text\n{text}\n```"


def main() -> int:
    """Record a run in a temporary folder, and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["UNFOG_CACHE"] = str(Path(folder) / "cache")
        training, stopped = record(TRAIN, "falling", b"\x03")
        _, listed = record(LIST)
        _, watched = record(WATCH)
    parts = [
        "# What the terminal shows\n\nRecorded by `python scripts/record_terminal.py` from the real program in a "
        "pseudo-terminal: Fashion-MNIST on two\nprocessor cores, with a small network and a short run.",
        "## While it trains\n\nThe last three lines are drawn anew as training goes on; the others stay. Without a "
        "terminal, there are plain lines\ninstead, every few seconds.",
        block(TRAIN, training),
        "## Ctrl-C\n\nThe live lines disappear, and the run is saved.",
        block(TRAIN, stopped),
        "## What there is\n\nRuns in a folder, and the charts of one. `unfog watch` refreshes them until q is pressed; "
        "`--once` prints one frame.",
        block(LIST, listed),
        block(WATCH, watched),
    ]
    PAGE.write_text("\n\n".join(parts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
