"""What torchrun starts again: the run that its first attempt made is gone on with, and no other."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from unfog.runs.folder import CODEC, RunFolder, next_folder, remove_empty

LAUNCH = "launch"
"""File in a run that says who started it."""


def launch() -> str | None:
    """What the attempts of one torchrun have in common, and no other has; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return None
    # Left open, the name is the same for all; the agent is the parent of its workers, also when it restarts them.
    return name if name not in ("", "none") else f"{socket.gethostname()}:{os.getppid()}"


def note_launch(folder: RunFolder) -> None:
    """Let a later attempt know that this run is its own."""
    if (name := launch()) is not None:
        (folder.path / LAUNCH).write_text(name)


def earlier_attempt(source: str, out: Path | None) -> RunFolder | None:
    """The run that an attempt before this one has made; None if there is none.

    What one left that was killed before its run had begun is taken away, as it would be in the way of another.

    Args:
        source: the images.
        out: the folder that was asked for; None looks among those named after the source.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    beside = next_folder(source).parent
    places = [out] if out is not None else list(beside.iterdir()) if beside.is_dir() else []
    found = [RunFolder(place) for place in places if (place / LAUNCH).is_file()]
    mine = [one for one in found if (one.path / LAUNCH).read_text() == launch()]
    for one in mine:
        if one.config_file.is_file():
            return one
        shutil.rmtree(one.path / CODEC, ignore_errors=True)
        (one.path / LAUNCH).unlink()
        remove_empty([one.path])
    return None
