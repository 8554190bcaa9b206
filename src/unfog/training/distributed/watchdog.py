"""Who hangs, when several processes train: each tells what it does, and who waits too long finds the one to blame."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

STEP = ("data", "forward", "backward", "agreeing")
"""What each process does in each step, in this order; none of it takes long, other than by waiting for the others."""


class Heartbeat(NamedTuple):
    """A sign of life."""

    rank: int
    number: int
    """Of this sign, counted from 1: one that goes on has a higher one each time."""
    step: int
    phase: str
    seconds: float
    """For which it has been at that."""
    where: str
    """Host and process."""


def find_failed_rank(signs: Sequence[Heartbeat], unheard: Mapping[int, float], timeout: float) -> str | None:
    """Which process the others wait for in vain, and what it was at; None if nothing is wrong.

    Args:
        signs: the last one of each.
        unheard: of each rank, the seconds for which its sign has been the same; they are counted only while somebody
            waits, from half of the timeout on.
        timeout: seconds that a part of a step may take.
    """
    late = any(sign.phase in STEP and sign.seconds > timeout for sign in signs)
    one = max(signs, key=lambda sign: unheard.get(sign.rank, 0.0))
    silent = unheard.get(one.rank, 0.0)
    if silent > (timeout / 3 if late else timeout):  # frozen, or cut off
        return f"rank {one.rank} ({one.where}) has given no sign of life for {silent:.0f} s; it was {_doing(one)}"
    if not late:
        return None
    # Who is behind all others is waited for; the one that is ahead waits.
    one = min((sign for sign in signs if sign.phase in STEP), key=lambda sign: (sign.step, STEP.index(sign.phase)))
    return f"rank {one.rank} ({one.where}) has been {_doing(one)} for {one.seconds:.0f} s"


def _doing(sign: Heartbeat) -> str:
    return f"in phase {sign.phase!r}" + (f" of step {sign.step:,}" if sign.step >= 0 else "")


class Watchdog:
    """A thread that tells the others what this process does, and ends it when one of them hangs.

    Ends it at once, as a process that waits inside a collective cannot be reached by an exception; torchrun then ends
    the others, and starts all of them anew from the newest checkpoint if it is told to (`--max-restarts`).
    """

    def __init__(self, rank: int, size: int, store: Store, timeout: float):
        self.rank, self.size, self.timeout = rank, size, timeout
        self._store = store
        self._interval = min(5.0, timeout / 12)
        self._at = ("starting", -1, time.monotonic())
        self._number = 0
        self._seen: dict[int, tuple[int, float]] = {}  # of each rank: its last sign's number, and when it was new
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vigil", daemon=True)

    def at(self, phase: str, step: int = -1) -> None:
        """Note what this process does from now on."""
        self._at = (phase, step, time.monotonic())

    def __enter__(self) -> Watchdog:
        self._tell()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if kind is None:
            self._thread.join(self._interval)

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            # Without a network nobody answers, and no error comes for a quarter of an hour. The others have then begun
            # anew, and must not meet what is left of this process.
            patience = self.timeout / 2
            cut_off = threading.Timer(patience, self._end, [f"torchrun's store has not answered for {patience:.0f} s"])
            cut_off.daemon = True
            cut_off.start()
            try:
                self._tell()
                if time.monotonic() - self._at[2] > self.timeout / 2:
                    self._look()
            except (dist.DistError, RuntimeError):  # the store is gone; who talks to it next says so
                return
            finally:
                cut_off.cancel()

    def _tell(self) -> None:
        phase, step, since = self._at
        self._number += 1
        where = f"{socket.gethostname()}, process {os.getpid()}"
        sign = Heartbeat(self.rank, self._number, step, phase, time.monotonic() - since, where)
        self._store.set(f"sign/{self.rank}", json.dumps(sign))

    def _look(self) -> None:
        signs = [Heartbeat(*json.loads(one)) for one in self._store.multi_get([f"sign/{r}" for r in range(self.size)])]
        now = time.monotonic()
        for sign in signs:
            if self._seen.get(sign.rank, (0, 0.0))[0] != sign.number:
                self._seen[sign.rank] = (sign.number, now)
        wrong = find_failed_rank(signs, {rank: now - since for rank, (_, since) in self._seen.items()}, self.timeout)
        if wrong is not None:
            self._end(f"{wrong}; rank {self.rank} ends, as it waits for it")

    def _end(self, why: str) -> None:
        if not self._over.is_set():
            with suppress(OSError):
                os.write(2, f"unfog: {why}\n".encode())
            os._exit(1)
