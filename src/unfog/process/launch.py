"""Restarts by torchrun: a later attempt resumes the run that an earlier one of the same launch has created."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from unfog.locks import LOCK
from unfog.process.run_folder import AUTOENCODER_FOLDER, RunFolder, next_folder, remove_empty_folders

_LAUNCH_FILE = "launch"
"""File in a run that names the launch that created it."""


def _launch_id() -> str | None:
    """Return an id shared by all attempts of one torchrun, and by no other; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return None
    return name if name not in ("", "none") else _agent()  # torchrun's default id is the same for all launches


def _agent() -> str:
    """Return the torchrun agent of this machine: the parent process of its workers, also after a restart."""
    return f"{socket.gethostname()}:{os.getppid()}"


def write_launch_file(folder: RunFolder) -> None:
    """Note the launch in the run, so that a later attempt finds it."""
    if (name := _launch_id()) is not None:
        (folder.path / _LAUNCH_FILE).write_text(f"{name}\n{_agent()}\n")


def find_earlier_attempt(source: str, out: Path | None) -> RunFolder | None:
    """Return the run that an earlier attempt of this launch has created; None if there is none.

    Leftovers of an attempt that was killed before its run began are removed. A run of an earlier launch with the same
    id is disowned.

    Args:
        source: the images.
        out: the requested folder; None looks among those named after the source.
    """
    # torchrun counts restarts after failures, but not when a node joins; then the same agent marks a later attempt.
    name, failed = _launch_id(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
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
