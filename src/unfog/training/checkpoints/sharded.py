"""A checkpoint that several processes write, each the rows that it has, into a folder that all of them see.

No collective takes part, so training goes on: each process tells the first one by torchrun's store what it has on disk,
flushed and read back, and the first one makes the whole a checkpoint when all have, by renaming the folder.
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

LOOK = 0.05  # seconds between two looks for what others have to say
TO_BE_SEEN = 30.0  # seconds that a network file system may take to show what another machine has written


class ShardStatusStore:
    """What the processes tell the first one about their parts of one checkpoint.

    Args:
        store: torchrun's, by a connection of its own.
        name: of this checkpoint, as no other has.
    """

    def __init__(self, store: Store, name: str):
        self._store, self._name = store, name

    def set(self, rank: int, said: dict[str, Any]) -> None:
        """Say something, in place of what was said before."""
        self._store.set(f"{self._name}/{rank}", json.dumps({"where": socket.gethostname(), **said}))

    def get(self, rank: int) -> dict[str, Any] | None:
        """What that process has said; None while it has not."""
        key = f"{self._name}/{rank}"
        found: dict[str, Any] | None = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return found


def write_shard(taken: Snapshot, checkpoints: Path, post: ShardStatusStore, give_up: threading.Event) -> bool:
    """Write this process's part of a checkpoint, and at the first process make it one when all have written theirs.

    May be tried again after an OSError.

    Args:
        taken: the part.
        checkpoints: the folder of checkpoints, which has to be there.
        post: by which the others tell.
        give_up: set when the others are not to be waited for any more.

    Returns:
        False if that was given up.

    Raises:
        OSError: it could not be written here; another process waits for room.
        RunError: another process could not write its part, or what it wrote is not to be seen.
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
    """What another process has written, once it is to be seen here; None if that was given up.

    Raises:
        OSError: it waits for room.
        RunError: it could not write, or another disk than this one.
    """
    while (said := post.get(rank)) is None:
        if give_up.wait(LOOK):
            return None
    who = f"rank {rank} ({said['where']})"
    if "full" in said:
        raise OSError(errno.ENOSPC, f"{who}: {said['full']}")
    if "failed" in said:
        raise RunError(f"{who}: {said['failed']}")
    files: dict[str, FileEntry] = said["files"]
    looks = int(TO_BE_SEEN / LOOK)
    while missing := [name for name, file in files.items() if not _is_visible(partial / name, file["bytes"])]:
        looks -= 1
        if looks < 0:
            raise RunError(
                f"{who} has written {partial / missing[0]}, which is not to be seen here; processes that divide a "
                "network need the run in a folder that all of them share"
            )
        if give_up.wait(LOOK):
            return None
    return files


def _is_visible(path: Path, size: int) -> bool:
    """Whether a file is there with all its bytes."""
    try:
        return path.stat().st_size == size
    except OSError:
        return False
