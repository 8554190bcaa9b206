"""Background writer: a thread writes checkpoints, one at a time, while training goes on; each rank its own shards.

Of a sharded state every rank writes its rows into a folder that all ranks see. There are no collectives: each rank
reports through torchrun's store once its files are flushed and read back. When all have, rank 0 publishes the
checkpoint by renaming the folder.
"""

from __future__ import annotations

import errno
import json
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from unfog.errors import RunError
from unfog.files.safe_files import make_folder, remove
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import rotation, snapshot
from unfog.training.checkpoints.snapshot import FileEntry, Snapshot
from unfog.training.settings import Checkpoint

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
RETRY = 1.0  # seconds between attempts
_TRIES = 3  # for errors other than a full disk, which may pass on a network file system
AWAY_SECONDS = 600.0  # that a disk which cannot be reached is waited for
_RETRY_BLINDLY = 30.0  # seconds; under a quota, the free space that the system reports does not count
_POLL_SECONDS = 0.05
_VISIBLE_SECONDS = 30.0  # that a network file system may take to show files of another machine


class _WriterEvent(NamedTuple):
    """An event of the thread, for the main thread to record."""

    kind: str
    step: int
    fields: dict[str, Any]


class CheckpointWriter:
    """Writes snapshots as checkpoints of one folder, then removes old ones according to `keep`.

    When the disk is full it waits for room, and removes nothing; while `is_away` says that the disk cannot be reached,
    it waits for that, too, but for minutes only. Other errors are raised by the next `wait`.
    """

    def __init__(self, checkpoints: Path, keep: Checkpoint, is_away: Callable[[], bool] = lambda: False):
        self.checkpoints, self.keep, self._is_away = checkpoints, keep, is_away
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._give_up = threading.Event()
        self._news: deque[_WriterEvent] = deque()
        self.waiting = False
        """Whether the disk is full."""
        self.away = False
        """Whether the disk cannot be reached."""

    def submit(self, taken: Snapshot, post: ShardStatusStore | None = None) -> None:
        """Begin to write a snapshot, after `wait` for the one before. `post` is the status store of a sharded one."""
        assert not self.busy
        self._give_up.clear()
        # A daemon: leaving the program in the middle of a write loses that checkpoint and no other.
        self._thread = threading.Thread(target=self._work, args=(taken, post), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Return whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long. Returns whether nothing is being written. Raises RunError if writing failed."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
        if self._error is not None:
            error, self._error = self._error, None
            raise RunError(
                f"a checkpoint could not be written to {self.checkpoints} ({error}); earlier ones are "
                f"intact. Correct that, then `unfog resume {self.checkpoints.parent}`"
            ) from error
        return True

    def abandon(self) -> None:
        """Stop waiting for disk space and other ranks, and drop the checkpoint unless it completes by itself."""
        self._give_up.set()

    def events(self) -> list[_WriterEvent]:
        """Return the events since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def _work(self, taken: Snapshot, post: ShardStatusStore | None) -> None:
        try:
            started = time.perf_counter()
            waited = self._write(taken, post)
            if waited is None or taken.rank > 0:
                return
            seconds, size = round(time.perf_counter() - started - waited, 3), taken.bytes
            if post is not None:  # the manifest lists the shards of the other ranks too
                whole = checkpoint.CheckpointInfo.read(self.checkpoints / f"{taken.step:08d}")
                size = sum(file.bytes for file in whole.files.values())
            costs = {"snapshot_seconds": round(taken.seconds, 4), "write_seconds": seconds, "bytes": size}
            self._tell("checkpoint", taken, folder=f"{taken.step:08d}", **costs)
            try:
                rotation.remove_old_checkpoints(self.checkpoints, self.keep)
            except OSError as error:  # no reason to stop training
                self._tell("not_removed", taken, reason=str(error))
        except Exception as error:  # raised again by `wait`, in the thread that can act on it
            self._error = error
            if post is not None and taken.rank > 0:
                with suppress(RuntimeError):  # the store is gone, and the first process with it
                    post.set(taken.rank, {"failed": str(error)})

    def _write(self, taken: Snapshot, post: ShardStatusStore | None) -> float | None:
        """Write as soon as there is room. Returns the seconds waited for it, or None if abandoned."""
        failures, first = 0, time.perf_counter()
        tried = first
        try:
            while True:
                try:
                    if post is None:
                        snapshot.write_checkpoint(taken, self.checkpoints)
                    elif not _write_shard(taken, self.checkpoints, post, self._give_up):
                        return None
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        if self._wait_for_disk(taken, error):
                            continue
                        failures += 1
                        # A full disk is waited for; anything else is a fault that somebody must see.
                        if failures == _TRIES or self._give_up.wait(RETRY):
                            raise
                        continue
                else:
                    if self.waiting:
                        self._tell("disk_has_room", taken, waited=round(tried - first, 1))
                    return tried - first
                if not self.waiting:
                    self.waiting = True
                    self._tell("disk_full", taken, needed=taken.bytes, free=free_bytes(self.checkpoints))
                    if post is not None and taken.rank > 0:  # the first process says so, and waits as well
                        post.set(taken.rank, {"full": "no space left"})
                while not (free_bytes(self.checkpoints) > taken.bytes or time.perf_counter() - tried > _RETRY_BLINDLY):
                    if self._give_up.wait(RETRY):
                        return None
                if self._give_up.wait(RETRY):
                    return None
                tried = time.perf_counter()
        finally:
            self.waiting = self.away = False

    def _wait_for_disk(self, taken: Snapshot, error: OSError) -> bool:
        """Wait while the disk cannot be reached. Returns False if it can be, or cannot for too long."""
        began = time.monotonic()
        while self._is_away():
            if not self.away:
                self.away = True
                self._tell("disk_away", taken, reason=str(error))
            if time.monotonic() - began > AWAY_SECONDS or self._give_up.wait(RETRY):
                return False
        if not self.away:
            return False
        self.away = False
        self._tell("disk_back", taken, waited=round(time.monotonic() - began, 1))
        return True

    def _tell(self, kind: str, taken: Snapshot, **fields: Any) -> None:
        self._news.append(_WriterEvent(kind, taken.step, fields))


def free_bytes(folder: Path) -> int:
    """Return the free bytes where a folder is, or will be."""
    while True:
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            if folder == folder.parent:
                return 0
            folder = folder.parent


class ShardStatusStore:
    """Status of each rank's shard files of one checkpoint, for rank 0, under a name in torchrun's store."""

    def __init__(self, store: Store, name: str):
        self._store, self._name = store, name

    def set(self, rank: int, said: dict[str, Any]) -> None:
        """Replace the status of a rank."""
        self._store.set(f"{self._name}/{rank}", json.dumps({"where": socket.gethostname(), **said}))

    def get(self, rank: int) -> dict[str, Any] | None:
        """Return the status of a rank, or None while it has none."""
        key = f"{self._name}/{rank}"
        found: dict[str, Any] | None = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return found


def _write_shard(taken: Snapshot, checkpoints: Path, post: ShardStatusStore, give_up: threading.Event) -> bool:
    """Write this rank's shard files; rank 0 publishes the checkpoint when all ranks have written theirs.

    May be repeated after an OSError. Returns False if `give_up` was set.

    Raises:
        OSError: it could not be written here; another process waits for room.
        RunError: another rank could not write its shard, or its files are not visible here.
    """
    folder, partial = checkpoints / f"{taken.step:08d}", checkpoints / f".partial-{taken.step:08d}"
    make_folder(partial, checkpoints.parent)
    with snapshot.system_errors():
        files = snapshot.file_entries(taken.write_files(partial))
        taken.verify_files(partial)
    if taken.rank > 0:
        snapshot.sync(partial)
        post.set(taken.rank, {"files": files})
        return True
    for rank in range(1, taken.size):
        theirs = _wait_for_shard(rank, partial, post, give_up)
        if theirs is None:
            return False
        files |= theirs
    for path in partial.iterdir():
        if path.name not in files:  # left by an earlier attempt
            remove(path, checkpoints.parent)
    taken.publish(partial, folder, files)
    return True


def _wait_for_shard(
    rank: int, partial: Path, post: ShardStatusStore, give_up: threading.Event
) -> dict[str, FileEntry] | None:
    """Return the files of another rank once they are visible here; None if `give_up` was set.

    Raises:
        OSError: the rank waits for disk space.
        RunError: it could not write, or writes to another disk.
    """
    while (said := post.get(rank)) is None:
        if give_up.wait(_POLL_SECONDS):
            return None
    who = f"rank {rank} ({said['where']})"
    if "full" in said:
        raise OSError(errno.ENOSPC, f"{who}: {said['full']}")
    if "failed" in said:
        raise RunError(f"{who}: {said['failed']}")
    files: dict[str, FileEntry] = said["files"]
    looks = int(_VISIBLE_SECONDS / _POLL_SECONDS)
    while missing := [name for name, file in files.items() if not _is_visible(partial / name, file["bytes"])]:
        looks -= 1
        if looks < 0:
            raise RunError(
                f"{who} has written {partial / missing[0]}, which cannot be found from here; processes that divide a "
                "network need the run in a folder that all of them share"
            )
        if give_up.wait(_POLL_SECONDS):
            return None
    return files


def _is_visible(path: Path, size: int) -> bool:
    """Return whether a file exists with all its bytes."""
    try:
        return path.stat().st_size == size
    except OSError:
        return False
