"""Checks of the paths that a request names, before any work is done."""

from __future__ import annotations

import os
import shlex
from os import PathLike
from pathlib import Path

from unfog.config.values import sanitize
from unfog.errors import RequestError
from unfog.locks import LOCK

_LONGEST_NAME = 255  # bytes; the limit of ext4, XFS, APFS and NTFS


def path_text(value: object, name: str) -> str:
    """Return a path as text, with ~ expanded. Raise RequestError if `value` is no path."""
    text = os.fspath(value) if isinstance(value, str | PathLike) else None
    if not isinstance(text, str):
        raise RequestError(f"{name} = {sanitize(value)} is no path; give a text or a pathlib.Path")
    return os.path.expanduser(text)


def check_out(out: Path, source: str = "", what: str = "a run folder") -> None:
    """Raise RequestError unless `out` is an empty folder or can be created; `source` is the folder of the images."""
    try:
        reason = _in_the_way(out, source)
    except (OSError, RuntimeError, ValueError) as error:
        reason = reason_of(error)
    if reason:
        raise RequestError(f"{sanitize(str(out))[1:-1]} cannot be {what}: {reason}; give another --out")


def _in_the_way(out: Path, source: str) -> str:
    """Return why `out` cannot be created; "" if it can."""
    whole = above = out.resolve()
    while not above.exists() and above != above.parent:
        above = above.parent
    if not str(out).encode("utf-8", "replace").decode().isprintable():
        return "its name has a character that cannot be shown"
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in out.parts):
        return "its name is too long"
    if not above.is_dir():
        return f"{above} is a file"
    if source and whole == Path(source).expanduser().resolve():
        return "the images are there, and a run has a folder of its own"
    if above == whole and (out / "config.toml").exists():
        return f"it is a run already; go on with `unfog resume {shlex.quote(str(out))}` instead"
    if above == whole and any(one.name != LOCK for one in out.iterdir()):
        return "it is not empty"
    return "" if os.access(above, os.W_OK | os.X_OK) else f"{above} may not be written to"


def reason_of(error: Exception) -> str:
    """Return the message of an error without the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".")
