"""Folder beside its target that one process writes, and that takes the target's place as a whole."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unfog.files.locks import LOCK, OVERDUE, OWNER, OwnedError, Owner, changed, lock_of, now_at
from unfog.files.safe_files import move, remove, remove_tree


@contextmanager
def work_folder(target: Path, rest: Path) -> Iterator[Path]:
    """Yield a folder beside `target` that is this process's alone: taken over from one that is gone, or made.

    Its name holds its owner, and it is taken over by renaming it, which one process alone can do: so no lock is needed.

    Args:
        target: what the folder is to become; the caller moves it there.
        rest: name of the folder while no process works in it: an interrupted one is taken from there, and gets the name
            at the end of the `with`, unless the caller has moved it, it is empty, or something else has the name.

    OwnedError if another process that may be at work has such a folder.
    """
    own = _claim(target, rest)
    try:
        yield own
    finally:
        with suppress(OSError):
            own.rmdir()  # fails unless it is empty
        with suppress(OSError):
            move(own, rest, target.parent)
        remove_tree(own, target.parent)


def _claim(target: Path, rest: Path) -> Path:
    own = target.with_name(f"{_stem(target)}.{Owner.this_process()}.partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    others = work_folders(target)
    for path, owner in others.items():
        if not _is_abandoned(path, owner):
            raise OwnedError(path, owner)
    if rest.is_dir() and not rest.is_symlink():
        with lock_of(rest):  # an earlier version of Unfog may work in it
            move(rest, own, target.parent)
        remove(own / LOCK, own)
        return own
    for path in others:
        with suppress(FileNotFoundError):  # another process has just taken it over
            move(path, own, target.parent)
            return own
    own.mkdir()
    # Of several processes that come at once and see each other, the first by name goes on.
    if any(path.name < own.name for path in work_folders(target)):
        own.rmdir()
        raise OwnedError(target)
    return own


def _stem(target: Path) -> str:
    """Return the beginning of the names of the work folders of a folder."""
    # A long name would have no room for the owner.
    name = target.name
    return name if len(os.fsencode(name)) <= 80 else hashlib.sha256(os.fsencode(name)).hexdigest()[:32]


def work_folders(target: Path) -> dict[Path, Owner]:
    """Return the folders of `work_folder` for a target that processes work in, or were killed in, and their owners."""
    if not target.parent.is_dir():
        return {}
    pattern = re.compile(rf"{re.escape(_stem(target))}\.({OWNER})\.partial", re.ASCII)
    found = {path: pattern.fullmatch(path.name) for path in target.parent.iterdir()}
    owners = {path: Owner.parse(match[1]) for path, match in found.items() if match}
    return {path: owner for path, owner in owners.items() if owner is not None}


def _is_abandoned(path: Path, owner: Owner) -> bool:
    """Return True if the process that has made a work folder is gone."""
    gone = owner.is_gone()
    if gone is None:
        with suppress(OSError):
            seen = max(changed(path / LOCK), path.stat().st_ctime)
            gone = now_at(path.parent) - seen > OVERDUE
    return gone is not False


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Make a folder beside `folder`, which takes its place at the end of the `with`; nothing stays after an exception.

    OSError if something other than an empty folder is there, or another process is writing it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.is_dir():  # a link to an empty folder cannot be replaced, and that folder can
        folder = folder.resolve()
        if os.listdir(folder):
            raise OSError(errno.ENOTEMPTY, "it is not empty", str(folder))
    hidden = folder.with_name(f".{folder.name}")
    try:
        with work_folder(hidden, rest=hidden.with_name(f"{hidden.name}.partial")) as partial:
            for name in os.listdir(partial):  # of a process that was killed
                remove_tree(partial / name, folder.parent)
            try:
                with lock_of(partial):
                    yield partial
                _move_to_new(partial, folder)
            except BaseException:
                remove_tree(partial, folder.parent)
                raise
    except OwnedError:
        raise OSError(errno.EBUSY, "another process is writing it", str(folder)) from None


def _move_to_new(path: Path, folder: Path) -> None:
    try:
        move(path, folder, folder.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise OSError(error.errno, "another process has written it meanwhile", str(folder)) from None
        raise
