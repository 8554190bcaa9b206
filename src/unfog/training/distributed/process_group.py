"""Communication between the processes that torchrun starts.

Tensors of a step go through torch's process group. Work that may take long (previews, evaluation, saving, reading
images) is done by rank 0 while the other ranks poll torchrun's store, and compute the parts that rank 0 gives them
(`_SharedWork`). The store allows waits of any length, as long as every rank sends heartbeats (`watchdog`).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from unfog.errors import Interrupted, LostProcess, RunError, UnfogError
from unfog.settings import AUTO
from unfog.training.distributed.watchdog import STOP, Watchdog
from unfog.training.settings import Training

_POLL_SECONDS, _PART_POLL_SECONDS = 0.05, 0.005
_LOST_SECONDS = 1.0  # between two looks at the processes of this machine
_PIECE = 2**22  # bytes; the store refuses values above 8 MiB
T = TypeVar("T")
# (job, rank, ranks) -> the part of the job that this rank computes, an array of numbers.
Part = Callable[[dict[str, Any], int, int], NDArray[Any]]


class ProcessGroup:
    """This process's `rank`, from 0, among `size` ranks, and messages between them.

    Without arguments, a single process whose collectives do nothing.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None, watchdog: Watchdog | None = None):
        self.rank, self.size = rank, size
        self._store, self._watchdog = store, watchdog
        # Keys in the store are numbered, so all ranks must count the same messages and barriers.
        self._messages = self._barriers = 0
        self._begun = False
        self._shared: _SharedWork | None = None  # while the other ranks wait for jobs
        self.part: Part | None = None  # how this rank, if it is not rank 0, computes its part of a job
        self._sent, self._read = 0, Counter[int]()  # reports of this rank, and those read of each other rank

    @property
    def has_own_gpu(self) -> bool:
        """True if no other rank computes on the GPU of this one."""
        return torch.cuda.is_available() and processes_per_gpu() == 1

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes files and logs for all."""
        return self.rank == 0

    def init_process_group(self, device: torch.device, timeout: float) -> None:
        """Initialise torch's process group: NCCL between GPUs, gloo otherwise. The watchdog gets the `timeout`."""
        if self._store is None or self._watchdog is None or self._begun:
            return
        self.barrier()  # rank 0 may have prepared for longer than torch's process group waits
        self._check_lost()  # a rank that has come and was killed; torch would wait for it in a call that no signal ends
        self.set_phase("meeting")
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # NCCL refuses ranks that share a GPU; gloo does not.
            backend = "cpu:gloo,cuda:nccl" if self.has_own_gpu else "gloo"
        patience = timedelta(seconds=1.5 * timeout + 30)  # longer than the watchdog's, whose message says more
        group = PrefixStore("group", self._store)
        dist.init_process_group(backend, store=group, rank=self.rank, world_size=self.size, timeout=patience)
        self._watchdog.timeout, self._begun = timeout, True

    def lost_rank(self) -> str:
        """Return the name of a rank whose process has ended before it left; "" if none of this machine has.

        It is "" too if the process that holds torchrun's store is gone, so that nobody can say who has left.
        """
        with contextlib.suppress(dist.DistError, RuntimeError):
            for rank, owner in ({} if self._watchdog is None else self._watchdog.find_ended()).items():
                if self._store is not None and not self._store.check([f"left/{rank}"]):
                    return f"rank {rank} ({owner.host}, process {owner.pid})"
        return ""

    def leave(self) -> None:
        """Wait for all ranks, as the store may live in the first process, and destroy the group of torch, if any.

        Raises:
            LostProcess: the process of a rank has ended before it came here.
        """
        if self._store is None:
            return
        self.set_phase("waiting for all")
        self._store.set(f"left/{self.rank}", "")
        self._wait([f"left/{rank}" for rank in range(self.size)])
        if self._begun:
            self._begun = False
            dist.destroy_process_group()

    def set_phase(self, phase: str, step: int = -1) -> None:
        """Note for the watchdog what this rank is doing. Costs nothing."""
        if self._watchdog is not None:
            self._watchdog.set_phase(phase, step)

    def announce_stop(self, requested: Callable[[], bool]) -> None:
        """Announce to the other ranks, within seconds, that this one is `requested` to stop."""
        if self._watchdog is not None:
            self._watchdog.stop_requested = requested

    def stopped_elsewhere(self) -> bool:
        """Return True once another rank has announced a stop."""
        return self._store is not None and self._store.check([STOP])

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks in place; the result has the same bits everywhere."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def run_on_main(self, phase: str, work: Callable[[], T], shared: bool = False) -> T:
        """Run `work` on rank 0 alone, and return its result, as JSON carries it, on every rank.

        With `shared`, the other ranks compute parts of the jobs that the work gives to `compute_parts`.

        Raises:
            Interrupted, RunError: on every rank, if rank 0 raised one.
        """
        if self.size == 1:
            return work()
        self._messages += 1
        key = f"said/{self._messages}"
        if not self.is_main:
            self.set_phase(f"waiting for rank 0: {phase}")
            value: T = self._receive(key, shared)
            return value
        self.set_phase(f"{phase} (rank 0 alone)")
        try:
            self._shared = self._shared_work(key) if shared else None
            try:
                value = work()
            finally:
                self._shared = None
        except BaseException as error:
            # Even a KeyboardInterrupt, or the other ranks would wait for this message until the watchdog ends them.
            self._send(key, _failure_message(error))
            raise
        self._send(key, {"value": value})
        return value

    def compute_parts(self, job: dict[str, Any], part: Part) -> list[NDArray[Any]]:
        """Return the parts of a job, which JSON must hold: one of each rank, in order, or all of it from rank 0."""
        return [part(job, 0, 1)] if self._shared is None else self._shared.compute(job, part)

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value, which JSON must hold, on every rank."""
        return self.run_on_main("telling", lambda: value)

    def send_report(self, lines: list[list[str]]) -> None:
        """Send lines to rank 0 without waiting; see `collect_reports`."""
        if self._store is not None and lines:
            self._sent += 1
            self._store.set(f"news/{self.rank}/{self._sent}", json.dumps(lines))

    def collect_reports(self) -> list[list[str]]:
        """Return, on rank 0, the lines that other ranks have sent since the last call."""
        found: list[list[str]] = []
        if self._store is None:
            return found
        for rank in range(1, self.size):
            while self._store.check([key := f"news/{rank}/{self._read[rank] + 1}"]):
                self._read[rank] += 1
                found += json.loads(self._store.get(key))
        return found

    def announce_failure(self, error: BaseException) -> None:
        """Announce to the other ranks that rank 0 fails, in case they wait for its next message."""
        if self.is_main and self._store is not None:
            with contextlib.suppress(dist.DistError):
                self._send(f"said/{self._messages + 1}", _failure_message(error))

    def barrier(self) -> None:
        """Wait until all ranks are here, however long that takes."""
        if self._store is None:
            return
        self._barriers += 1
        self.set_phase("waiting for all")
        # The last rank notifies the others; a barrier of torch would time out while rank 0 reads images for an hour.
        if self._store.add(f"met/{self._barriers}", 1) == self.size:
            self._store.set(f"all met/{self._barriers}", "")
        self._wait([f"all met/{self._barriers}"])

    def _send(self, key: str, message: dict[str, Any]) -> None:
        assert self._store is not None
        self._store.set(key, json.dumps(message, default=float))

    def _shared_work(self, key: str) -> _SharedWork:
        assert self._store is not None
        return _SharedWork(self._store, f"{key}/job", self.rank, self.size)

    def _receive(self, key: str, shared: bool) -> Any:
        jobs, part = self._shared_work(key), self.part
        self._wait([key], (lambda: jobs.help(part)) if shared and part is not None else lambda: None)
        assert self._store is not None
        message = json.loads(self._store.get(key))
        if "stopped" in message:
            raise Interrupted(message["stopped"])
        if "failed" in message:
            raise RunError(f"rank 0 failed: {message['failed']}")
        return message["value"]

    def _wait(self, keys: list[str], meanwhile: Callable[[], None] = lambda: None) -> None:
        assert self._store is not None
        pause, looked = 0.001, time.monotonic()
        try:
            # Polled, because the store's own wait would time out and block the watchdog's heartbeats.
            while not self._store.check(keys):
                meanwhile()
                time.sleep(pause)
                pause = min(2 * pause, _POLL_SECONDS)
                if time.monotonic() - looked > _LOST_SECONDS:
                    looked = time.monotonic()
                    if self._store.check(keys):  # a rank that failed says why before it ends
                        return
                    self._check_lost()
        except (dist.DistError, RuntimeError) as error:
            raise LostProcess(f"the process that holds torchrun's store is gone ({error})") from None

    def _check_lost(self) -> None:
        """LostProcess if the process of another rank has ended, which would be waited for without end."""
        if name := self.lost_rank():
            raise LostProcess(
                f"{name} has ended; start the command again, or a training that has a checkpoint with unfog resume, "
                "as torchrun does by itself with --max-restarts"
            )


def _failure_message(error: BaseException) -> dict[str, str]:
    if isinstance(error, KeyboardInterrupt):
        return {"stopped": str(error)}
    return {"failed": str(error) if isinstance(error, UnfogError) else f"{type(error).__name__}: {error}"}


def local_world_size() -> int:
    """Return the number of processes that torchrun has started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def world_size() -> int:
    """Return the number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


_sharing = 0  # ranks on the GPU of this one; 0 before `agree_on_gpus`


def processes_per_gpu() -> int:
    """Return how many ranks compute on the GPU of this one; before they have met, by the GPUs that are visible."""
    return _sharing or -(-local_world_size() // max(1, torch.cuda.device_count()))


def agree_on_gpus(store: Store, rank: int, size: int) -> None:
    """Learn which ranks share a GPU. All ranks call this."""
    # The number of visible GPUs is not enough: a scheduler may show each process its own GPU alone.
    global _sharing
    own = _gpu_identity()
    store.set(f"gpu/{rank}", own)
    _sharing = [store.get(f"gpu/{other}").decode() for other in range(size)].count(own)


def _gpu_identity() -> str:
    """Return a text that two ranks have in common only if they compute on the same GPU."""
    if not torch.cuda.is_available():
        return socket.gethostname()
    device = torch.device(local_device("cuda"))
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def local_device(name: str) -> str:
    """Return this process's device: processes on one machine take its GPUs in turn."""
    local = os.environ.get("LOCAL_RANK")
    if local is None or world_size() == 1 or name.partition(":")[0] not in (AUTO, "cuda"):
        return name
    if not torch.cuda.is_available():
        return name
    return f"cuda:{int(local) % torch.cuda.device_count()}"


def agree_on_name(store: Store, rank: int, size: int, timeout: float = Training.timeout) -> str:
    """Agree on a prefix for keys in the store that no earlier attempt has used. RunError if some ranks do not come."""
    # torchrun keeps its store at a restart. Rank 0 publishes a name, and the others answer under it with a token of
    # their own until they find that token in rank 0's list, so that entries of an earlier attempt mislead nobody.
    token, until, known = uuid.uuid4().hex, time.monotonic() + timeout, ""
    if rank == 0:
        store.set("now", token)
        hello = [f"{token}/{other}" for other in range(1, size)]
        while not all(store.check([key]) for key in hello):
            if time.monotonic() > until:
                missing = [str(i + 1) for i, key in enumerate(hello) if not store.check([key])]
                raise RunError(
                    f"rank {', '.join(missing)} did not come within {timeout:.0f} s; check that its machine runs"
                )
            time.sleep(_POLL_SECONDS)
        store.set(f"{token}/all", json.dumps([store.get(key).decode() for key in hello]))
        return token
    while time.monotonic() < until:
        name = store.get("now").decode()
        if name != known:
            store.set(f"{name}/{rank}", token)
            known = name
        if store.check([f"{name}/all"]) and token in json.loads(store.get(f"{name}/all")):
            return name
        time.sleep(_POLL_SECONDS)
    raise RunError(f"rank {rank} waited {timeout:.0f} s for the others; check that their machines run")


class _SharedWork:
    """The jobs of one message of rank 0. Both sides count them, so all ranks make one of these at the same place.

    Rank 0 sends jobs and receives arrays through torchrun's store. So it can be interrupted at any moment without
    leaving the others in a collective that never ends.
    """

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
            time.sleep(_PART_POLL_SECONDS)  # in Python, so that a signal can interrupt it
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
