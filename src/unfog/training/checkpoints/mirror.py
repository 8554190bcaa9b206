"""Mirror of a run: its folder copied to a second place after each checkpoint, by a thread.

A checkpoint is copied under a name that is never read, its manifest last, and then renamed. Every other file is copied
beside its place and renamed. The records are copied before the checkpoint that refers to them, so whatever a crash
leaves is a run that resumes.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from unfog.errors import RequestError
from unfog.files.locks import MIRROR_MARK
from unfog.files.safe_files import (
    LARGEST_TEXT,
    make_folder,
    open_file,
    read_file,
    remove,
    remove_tree,
    replace_file,
    write_atomic,
)
from unfog.text import is_address
from unfog.training.checkpoints import rotation
from unfog.training.checkpoints.format import CONFIG, MANIFEST, CheckpointInfo, list_checkpoints, run_of
from unfog.training.checkpoints.snapshot import sync

CHECKPOINTS = "checkpoints"
# Files about the training process, and requests to it, which mean nothing in a copy.
_LEFT_OUT = frozenset(["heartbeat.json", "launch", "SAVE", "PREVIEW", "STOP"])
_RECORDS = frozenset(["metrics.jsonl", "events.jsonl"])
_BLOCK = 2**20  # bytes that are copied at a time


class Copied(NamedTuple):
    """Result of one pass over the mirror."""

    step: int | None
    """Newest checkpoint of the mirror; None if it has none yet."""
    bytes: int
    seconds: float


class Stopped(Exception):
    """The copy was abandoned between two blocks."""


def check_mirror(run: Path, mirror: str, new: bool) -> Path | None:
    """Return the folder of the mirror of a run, or None without one. `new`: the run does not exist yet.

    RequestError if it cannot be one: it holds another run, or newer checkpoints, or lies in the run.
    """
    if not mirror:
        return None
    if is_address(mirror):
        raise RequestError(f"mirror = {mirror!r} is an address and not a path; mount the bucket, and give the folder")
    try:
        place, here = Path(mirror).expanduser(), run.resolve()
        there = place.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise RequestError(f"mirror = {mirror!r} is not a path: {error}; give a folder") from None
    if there == here and not new:
        return None  # the run was resumed from its mirror
    if there == here or here in there.parents or there in here.parents:
        raise RequestError(f"mirror = {mirror} and the run {run} lie in each other; give a folder elsewhere")
    if there.exists() and not there.is_dir():
        raise RequestError(f"mirror = {mirror} is a file; give another folder")
    if not _is_used(there):
        return place
    if new:
        remedy = f"`unfog resume {mirror}` continues the run in it" if (there / CONFIG).exists() else "it has files"
        raise RequestError(f"mirror = {mirror} is not empty; {remedy}, or give another --mirror")
    if (known := _identity(there)) is None or known != _identity(run):
        raise RequestError(f"mirror = {mirror} holds another run; give another --mirror, or --mirror '' for none")
    steps = [max((one.step for one in list_checkpoints(one / CHECKPOINTS)[0]), default=-1) for one in (run, there)]
    if steps[1] > steps[0]:
        raise RequestError(
            f"mirror = {mirror} has step {steps[1]:,}, and {run} only {max(steps[0], 0):,}; `unfog resume {mirror}` "
            "continues the newer one, or give another --mirror"
        )
    return place


def _is_used(folder: Path) -> bool:
    with suppress(OSError):
        return any(not name.startswith(".") for name in os.listdir(folder))
    return False


def _identity(run: Path) -> bytes | None:
    """Return the first line of the events of a run, which has the time of its start; None without one."""
    for name in (MIRROR_MARK, "events.jsonl"):  # a first copy that was killed has no events yet
        with suppress(OSError), open_file(run / name, "rb", run) as file:
            line = file.readline(2**16)
            if line.endswith(b"\n"):
                return line
    return None


class Mirror:
    """Copies a run to its mirror in a thread: one pass at a time, and after it one more if there is news."""

    def __init__(self, run: Path, place: Path):
        self.run, self.place = run, place
        self._lock, self._again, self._stop = threading.Lock(), False, threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: dict[str, tuple[int, int]] = {}
        self._news: deque[Copied | str] = deque()

    def request(self) -> None:
        """Copy what is new, from now on or after the pass that runs."""
        with self._lock:
            self._again = True
            if self._thread is None:
                # A daemon: leaving the program in the middle of a copy leaves a whole mirror.
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long. Returns whether nothing is being copied."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return self._thread is None

    def abandon(self) -> None:
        """Leave the pass that runs between two blocks; the mirror stays whole."""
        self._stop.set()

    def news(self) -> list[Copied | str]:
        """Return the results of the passes since the last call; of one that failed the reason."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._again or self._stop.is_set():
                    self._thread = None
                    return
                self._again = False
            try:
                self._news.append(copy_run(self.run, self.place, self._seen, self._stop))
            except Stopped:
                pass
            except Exception as error:  # training goes on whatever happens to the mirror
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
                self._news.append(f"{where}{reason}")


def copy_run(run: Path, place: Path, seen: dict[str, tuple[int, int]], stop: threading.Event) -> Copied:
    """Copy what is new in a run to its mirror, and remove there what the run has removed.

    Args:
        run: the folder of the run.
        place: the mirror, which is made if it is missing.
        seen: size and time of each file as it was copied last; filled in here.
        stop: set from outside to abandon the copy, which raises Stopped.

    Raises:
        OSError: a file cannot be read or written.
    """
    started = time.perf_counter()
    place.mkdir(parents=True, exist_ok=True)
    if (line := _identity(run)) and _identity(place) != line:
        write_atomic(place / MIRROR_MARK, line, place)
    target = place / CHECKPOINTS
    make_folder(target, place)
    rotation.restore_replaced(target)
    rotation.remove_leftovers(target, [])  # of a process that was killed
    size = sum(_copy_files(run, place, seen, stop, records=False))
    # A checkpoint covers the records before it. Without any checkpoint, records alone could not be resumed.
    first = not list_checkpoints(target)[0]
    size += 0 if first else sum(_copy_files(run, place, seen, stop, records=True))
    saved, broken = list_checkpoints(run / CHECKPOINTS)
    for one in reversed(saved):  # the newest first, which is worth most
        size += _copy_checkpoint(one, target, stop)
    size += sum(_copy_files(run, place, seen, stop, records=True)) if first and saved else 0
    # What is damaged in the run may be whole here.
    kept = {one.folder.name for one in saved} | {one.folder.name for one in broken}
    for old in list_checkpoints(target)[0] if saved else []:
        if old.folder.name not in kept:
            rotation.remove_checkpoint(old.folder)
    newest = max((one.step for one in list_checkpoints(target)[0]), default=None)
    return Copied(newest, size, time.perf_counter() - started)


def _copy_files(
    run: Path, place: Path, seen: dict[str, tuple[int, int]], stop: threading.Event, records: bool
) -> Iterator[int]:
    """Copy the files beside the checkpoints that are new, and yield their bytes: the `records`, or all others."""
    for folder, folders, names in os.walk(run):
        where = Path(folder).relative_to(run)
        top = where == Path()
        folders[:] = [] if records else [one for one in folders if _is_copied(one) and not (top and one == CHECKPOINTS)]
        for name in sorted(names):
            if _is_copied(name) and (top and name in _RECORDS) == records and not (top and name in _LEFT_OUT):
                yield _copy_file(run, place, where / name, seen, stop)
        if not top:  # a person may keep notes in the mirror itself
            _remove_others(place / where, {*names, *folders}, place)


def _is_copied(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(".partial")


def _remove_others(folder: Path, names: set[str], place: Path) -> None:
    """Remove the files of a folder of the mirror that the run has no more, such as averages after a roll-back."""
    with suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if name not in names and (folder / name).is_file():
                remove(folder / name, place)


def _copy_file(run: Path, place: Path, name: Path, seen: dict[str, tuple[int, int]], stop: threading.Event) -> int:
    """Copy a file that differs from its copy. Returns the bytes copied; 0 for a link, or if the file is gone."""
    try:
        status = os.lstat(run / name)
    except FileNotFoundError:  # a preview that was replaced, say
        return 0
    state, key = (status.st_size, status.st_mtime_ns), str(name)
    if not stat.S_ISREG(status.st_mode) or seen.get(key) == state:
        return 0
    with suppress(OSError):
        there = os.lstat(place / name)
        if key not in seen and stat.S_ISREG(there.st_mode) and (there.st_size, there.st_mtime_ns) == state:
            seen[key] = state
            return 0
    make_folder((place / name).parent, place)
    private = not status.st_mode & 0o077  # config.toml with the secrets of an address
    with replace_file(place / name, place, private=private) as copy:
        _copy_bytes(run / name, run, copy, stop)
    with suppress(OSError):  # some mounts keep no times; then it is copied again by the next process
        os.utime(place / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    seen[key] = state
    return status.st_size


def _copy_checkpoint(saved: CheckpointInfo, target: Path, stop: threading.Event) -> int:
    """Copy a checkpoint unless the mirror has the same. Returns its bytes; 0 if it is gone meanwhile."""
    place, run = target.parent, run_of(saved.folder)
    folder, partial = target / saved.folder.name, target / f".partial-{saved.folder.name}"
    try:
        manifest = read_file(saved.folder / MANIFEST, run, LARGEST_TEXT)
        with suppress(OSError, ValueError):
            if read_file(folder / MANIFEST, place, LARGEST_TEXT) == manifest:
                return 0
        make_folder(partial, place)
        for name, file in saved.files.items():
            with replace_file(partial / name, place) as copy:
                digest = _copy_bytes(saved.folder / name, run, copy, stop)
            if digest != file.sha256:
                raise OSError(None, "is not what was saved (sha256 differs)", str(saved.folder / name))
    except FileNotFoundError:
        remove_tree(partial, place)
        if saved.folder.exists():
            raise
        return 0  # removed by the run as an old one
    write_atomic(partial / MANIFEST, manifest, place)
    sync(partial)
    rotation.replace_checkpoint(partial, folder)
    sync(target)
    return sum(file.bytes for file in saved.files.values())


def _copy_bytes(path: Path, root: Path, copy: Any, stop: threading.Event) -> str:
    """Copy the content of a file, and return its sha256."""
    digest = hashlib.sha256()
    with open_file(path, "rb", root) as source:
        while block := source.read(_BLOCK):
            if stop.is_set():
                raise Stopped
            digest.update(block)
            copy.write(block)
    return digest.hexdigest()
