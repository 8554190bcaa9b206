"""Shared work: ranks that wait for rank 0 compute parts of its previews and evaluations.

Rank 0 asks through torchrun's store, and gets arrays back through it. So it can be interrupted at any moment without
leaving the others in a collective that never ends.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import Store

from unfog.errors import RunError

# (job, rank, ranks) -> the part of the job that this rank computes, an array of numbers.
Part = Callable[[dict[str, Any], int, int], NDArray[Any]]
_PIECE = 2**22  # bytes; the store refuses values above 8 MiB
_POLL_SECONDS = 0.005


class SharedWork:
    """The jobs of one message of rank 0. Both sides count them, so all ranks make one of these at the same place."""

    def __init__(self, store: Store, name: str, rank: int, size: int):
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self._jobs = 0

    def compute(self, job: dict[str, Any], part: Part) -> list[NDArray[Any]]:
        """Return the parts of all ranks, in order of rank. On rank 0. RunError if another rank failed."""
        self._jobs += 1
        self._store.set(self._key(), json.dumps(job))
        own = part(job, 0, self._size)
        return [own, *(self._receive(rank) for rank in range(1, self._size))]

    def help(self, part: Part) -> None:
        """Compute and send this rank's part, if rank 0 has asked for one since the last call."""
        if not self._store.check([self._key(1)]):
            return
        self._jobs += 1
        data = io.BytesIO()
        try:
            np.save(data, part(json.loads(self._store.get(self._key())), self._rank, self._size), allow_pickle=False)
            pieces, failed = [data.getvalue()[i : i + _PIECE] for i in range(0, data.tell(), _PIECE)], ""
        except Exception as error:  # any of them is rank 0's to report
            pieces, failed = [], f"{type(error).__name__}: {error}"
        for i, piece in enumerate(pieces):
            self._store.set(f"{self._key()}/{self._rank}/{i}", piece)  # type: ignore[arg-type]  # bytes are taken too
        self._store.set(f"{self._key()}/{self._rank}", json.dumps({"pieces": len(pieces), "failed": failed}))

    def _key(self, ahead: int = 0) -> str:
        return f"{self._name}/{self._jobs + ahead}"

    def _receive(self, rank: int) -> NDArray[Any]:
        key = f"{self._key()}/{rank}"
        while not self._store.check([key]):
            time.sleep(_POLL_SECONDS)  # in Python, so that a signal can interrupt it
        answer = json.loads(self._take(key))
        data = b"".join(self._take(f"{key}/{i}") for i in range(answer["pieces"]))
        if answer["failed"]:
            raise RunError(f"rank {rank} failed: {answer['failed']}")
        found: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
        return found

    def _take(self, key: str) -> bytes:
        """Return a value and delete it, as samples of an evaluation may take hundreds of megabytes."""
        value: bytes = self._store.get(key)
        self._store.delete_key(key)
        return value
