"""Sharded checkpoints: every rank writes its rows into a folder that all ranks see, while training goes on.

Without collectives: each rank reports through torchrun's store once its files are flushed and read back. When all have,
rank 0 publishes the checkpoint by renaming the folder.
"""

from __future__ import annotations

import errno
import json
import socket
import threading
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store

from unfog.errors import RunError
from unfog.training.checkpoints import snapshot
from unfog.training.checkpoints.snapshot import FileEntry, Snapshot

_POLL_SECONDS = 0.05
_VISIBLE_SECONDS = 30.0  # that a network file system may take to show files of another machine


class ShardStatusStore:
    """Status of each rank's shard files of one checkpoint, for rank 0.

    Args:
        store: torchrun's, by a connection of its own.
        name: unique to this checkpoint.
    """

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


def write_shard(taken: Snapshot, checkpoints: Path, post: ShardStatusStore, give_up: threading.Event) -> bool:
    """Write this rank's shard files; rank 0 publishes the checkpoint when all ranks have written theirs.

    May be repeated after an OSError.

    Args:
        taken: this rank's rows.
        checkpoints: the existing folder of checkpoints.
        post: status of the ranks.
        give_up: set to stop waiting for other ranks.

    Returns:
        False if `give_up` was set.

    Raises:
        OSError: it could not be written here; another process waits for room.
        RunError: another rank could not write its shard, or its files are not visible here.
    """
    folder, partial = checkpoints / f"{taken.step:08d}", checkpoints / f".partial-{taken.step:08d}"
    partial.mkdir(exist_ok=True)
    with snapshot.system_errors():
        files = snapshot.file_entries(snapshot.write_files(taken, partial))
        snapshot.verify_files(taken, partial)
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
        if path.name not in files:  # of an attempt before
            path.unlink()
    snapshot.publish_checkpoint(taken, partial, folder, files)
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
                f"{who} has written {partial / missing[0]}, which is not to be seen here; processes that divide a "
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
