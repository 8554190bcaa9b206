"""Watchdog for distributed training: every rank publishes its phase; a rank that times out names the one that hangs."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from unfog.files.locks import Owner

# Phases of a step, in order. None of them takes long, other than by waiting for other ranks.
_STEP = ("data", "forward", "backward", "agreeing")
# Phase of a rank that waits for its images, a limited time: it and those that wait for it are not late meanwhile.
AWAITING_IMAGES = "waiting for images"
STOP = "stop"  # key that exists once a rank is asked to stop


class _Heartbeat(NamedTuple):
    """The phase of a rank, as published in torchrun's store."""

    rank: int
    number: int
    """Counts the heartbeats of the rank; one that no longer grows means that the rank is frozen or cut off."""
    step: int
    phase: str
    seconds: float
    """Time spent in the phase so far."""
    where: str
    """Host and process."""


def _find_failed_rank(signs: Sequence[_Heartbeat], unheard: Mapping[int, float], timeout: float) -> str | None:
    """Return a message that names the rank which the others wait for in vain, or None if nothing is wrong.

    Args:
        signs: the last heartbeat of each rank.
        unheard: seconds since the heartbeat of a rank was new, counted only while this rank waits.
        timeout: seconds that a phase of a step may take.
    """
    awaiting = any(sign.phase == AWAITING_IMAGES for sign in signs)
    late = not awaiting and any(sign.phase in _STEP and sign.seconds > timeout for sign in signs)
    one = max(signs, key=lambda sign: unheard.get(sign.rank, 0.0))
    silent = unheard.get(one.rank, 0.0)
    if silent > (timeout / 3 if late else timeout):  # frozen, or cut off
        return f"rank {one.rank} ({one.where}) has given no sign of life for {silent:.0f} s; it was {_doing(one)}"
    if not late:
        return None
    # The rank that is furthest behind is the one that the others wait for.
    one = min((sign for sign in signs if sign.phase in _STEP), key=lambda sign: (sign.step, _STEP.index(sign.phase)))
    return f"rank {one.rank} ({one.where}) has been {_doing(one)} for {one.seconds:.0f} s"


def _doing(sign: _Heartbeat) -> str:
    return f"in phase {sign.phase!r}" + (f" of step {sign.step:,}" if sign.step >= 0 else "")


class Watchdog:
    """A thread that publishes this rank's phase, and ends the process when another rank hangs.

    torchrun then ends the other ranks, and with `--max-restarts` starts all of them again from the newest checkpoint.
    """

    def __init__(self, rank: int, size: int, store: Store, timeout: float):
        self.rank, self.size, self.timeout = rank, size, timeout
        self._store = store
        # Four within the third of the timeout after which a silent rank is taken for frozen.
        self._interval = min(5.0, timeout / 12)
        self._at = ("starting", -1, time.monotonic())
        self._number = 0
        self._seen: dict[int, tuple[int, float]] = {}  # of each rank: its last sign's number, and when it was new
        self._owners: dict[int, Owner] = {}
        self._over = threading.Event()
        self.stop_requested: Callable[[], bool] = lambda: False
        """Whether this rank is asked to stop, which the others are told."""
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def set_phase(self, phase: str, step: int = -1) -> None:
        """Note the phase that begins now."""
        self._at = (phase, step, time.monotonic())

    def find_ended(self) -> dict[int, Owner]:
        """Return the ranks of this machine whose processes have ended, each with its owner."""
        if not self._owners:  # which all ranks publish as they begin, and never change
            keys = [f"owner/{rank}" for rank in range(self.size)]
            if not self._store.check(keys):
                return {}
            found = {rank: Owner.parse(one.decode()) for rank, one in enumerate(self._store.multi_get(keys))}
            self._owners = {rank: one for rank, one in found.items() if one is not None}
        return {rank: owner for rank, owner in self._owners.items() if owner.is_gone()}

    def __enter__(self) -> Watchdog:
        self._store.set(f"owner/{self.rank}", str(Owner.this_process()))
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
            # Without a network the store neither answers nor fails for a quarter of an hour. By then the others have
            # been restarted, and must not meet what is left of this process.
            patience = self.timeout / 2
            cut_off = threading.Timer(patience, self._end, [f"torchrun's store has not answered for {patience:.0f} s"])
            cut_off.daemon = True
            cut_off.start()
            try:
                self._tell()
                if time.monotonic() - self._at[2] > self.timeout / 2:
                    self._look()
            except (dist.DistError, RuntimeError):  # the store is gone; the main thread will report that
                return
            finally:
                cut_off.cancel()

    def _tell(self) -> None:
        phase, step, since = self._at
        self._number += 1
        where = f"{socket.gethostname()}, process {os.getpid()}"
        sign = _Heartbeat(self.rank, self._number, step, phase, time.monotonic() - since, where)
        self._store.set(f"sign/{self.rank}", json.dumps(sign))
        if self.stop_requested():
            self._store.set(STOP, "")

    def _look(self) -> None:
        signs = [_Heartbeat(*json.loads(one)) for one in self._store.multi_get([f"sign/{r}" for r in range(self.size)])]
        now = time.monotonic()
        for sign in signs:
            if self._seen.get(sign.rank, (0, 0.0))[0] != sign.number:
                self._seen[sign.rank] = (sign.number, now)
        wrong = _find_failed_rank(signs, {rank: now - since for rank, (_, since) in self._seen.items()}, self.timeout)
        if wrong is not None:
            self._end(f"{wrong}; rank {self.rank} ends, as it waits for it")

    def _end(self, why: str) -> None:
        if not self._over.is_set():
            with suppress(OSError):
                os.write(2, f"unfog: {why}\n".encode())
            # An exception could not reach a main thread that waits inside a collective.
            os._exit(1)
