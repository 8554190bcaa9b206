"""What torchrun starts again: the run that its first attempt made is gone on with, and no other."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from unfog.locks import LOCK
from unfog.process.run_folder import AUTOENCODER_FOLDER, RunFolder, next_folder, remove_empty_folders

_LAUNCH_FILE = "launch"
"""File in a run that says who started it."""


def launch_id() -> str | None:
    """What the attempts of one torchrun have in common, and no other has; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return None
    return name if name not in ("", "none") else _agent()  # left open, the name is the same for all


def _agent() -> str:
    """The torchrun on this machine: the parent of its workers, also when it starts them again."""
    return f"{socket.gethostname()}:{os.getppid()}"


def write_launch_file(folder: RunFolder) -> None:
    """Let a later attempt know that this run is its own."""
    if (name := launch_id()) is not None:
        (folder.path / _LAUNCH_FILE).write_text(f"{name}\n{_agent()}\n")


def find_earlier_attempt(source: str, out: Path | None) -> RunFolder | None:
    """The run that an attempt before this one has made; None if there is none.

    What one left that was killed before its run had begun is taken away, as it would be in the way of another. A run of
    an earlier launch by the same name is nobody's from here on. After a failure torchrun counts restarts, but not when
    a node joins; then it is by the agent that an attempt is known not to be the first.

    Args:
        source: the images.
        out: the folder that was asked for; None looks among those named after the source.
    """
    name, failed = launch_id(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if name is None:
        return None
    beside = next_folder(source).parent
    places = [out] if out is not None else list(beside.iterdir()) if beside.is_dir() else []
    for one in [RunFolder(place) for place in places if (place / _LAUNCH_FILE).is_file()]:
        noted = (one.path / _LAUNCH_FILE).read_text().splitlines()
        if noted[:1] != [name]:
            continue
        begun, mine = one.config_file.is_file(), failed or noted[1:] == [_agent()]
        if begun and mine:
            return one
        (one.path / _LAUNCH_FILE).unlink()
        if mine:
            shutil.rmtree(one.path / AUTOENCODER_FOLDER, ignore_errors=True)
            (one.path / LOCK).unlink(missing_ok=True)
            remove_empty_folders([one.path])
    return None
