"""Rendezvous: the processes that torchrun has started find each other, and their devices."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from unfog.errors import RunError
from unfog.training.distributed.process_group import POLL_SECONDS
from unfog.training.distributed.watchdog import Watchdog
from unfog.training.distributed.world import SINGLE_PROCESS, World
from unfog.training.settings import Training


def local_world_size() -> int:
    """Return the number of processes that torchrun has started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def world_size() -> int:
    """Return the number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return whether this is rank 0."""
    return os.environ.get("RANK", "0") == "0"


def local_device(name: str) -> str:
    """Return this process's device: processes on one machine take its GPUs in turn."""
    local = os.environ.get("LOCAL_RANK")
    if local is None or world_size() == 1 or name.partition(":")[0] not in ("auto", "cuda"):
        return name
    if not torch.cuda.is_available():
        return name
    return f"cuda:{int(local) % torch.cuda.device_count()}"


def processes_per_device(device: torch.device) -> int:
    """Return how many of torchrun's processes on this machine share this device at most."""
    devices = torch.cuda.device_count() if device.type == "cuda" else 1
    return -(-local_world_size() // devices)


def agree_on_name(store: Store, rank: int, size: int, timeout: float = Training.timeout) -> str:
    """Agree on a prefix for keys in the store that no earlier attempt has used: torchrun keeps its store at a restart.

    Rank 0 publishes a name. The other ranks answer under it with a token of their own, until they find that token in
    rank 0's list. So entries of an earlier attempt mislead nobody.

    Raises:
        RunError: some are not there in time.
    """
    token, until, known = uuid.uuid4().hex, time.monotonic() + timeout, ""
    if rank == 0:
        store.set("now", token)
        hello = [f"{token}/{other}" for other in range(1, size)]
        while not all(store.check([key]) for key in hello):
            if time.monotonic() > until:
                missing = [str(i + 1) for i, key in enumerate(hello) if not store.check([key])]
                raise RunError(f"rank {', '.join(missing)} did not come within {timeout:.0f} s; is its machine there?")
            time.sleep(POLL_SECONDS)
        store.set(f"{token}/all", json.dumps([store.get(key).decode() for key in hello]))
        return token
    while time.monotonic() < until:
        name = store.get("now").decode()
        if name != known:
            store.set(f"{name}/{rank}", token)
            known = name
        if store.check([f"{name}/all"]) and token in json.loads(store.get(f"{name}/all")):
            return name
        time.sleep(POLL_SECONDS)
    raise RunError(f"rank {rank} waited {timeout:.0f} s for the others; are their machines there?")


@contextlib.contextmanager
def init_world(timeout: float = Training.timeout) -> Iterator[World]:
    """Return a context with the ranks that torchrun has started, or a single process. Only rank 0 writes to stderr.

    Args:
        timeout: seconds after which a rank that hangs ends the others.
    """
    if world_size() == 1:
        yield SINGLE_PROCESS
        return
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_world_size()))
    shared, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=Training.timeout)))
    store = PrefixStore(f"unfog/{agree_on_name(shared, rank, size)}", shared)
    with contextlib.ExitStack() as stack:
        if rank > 0:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        # A connection of its own, because a wait of the main thread holds the one that it uses.
        watchdog = stack.enter_context(Watchdog(rank, size, store.clone(), timeout))  # type: ignore[attr-defined]
        world = World(rank, size, store, watchdog)
        try:
            yield world
        except BaseException as error:
            world.announce_failure(error)
            raise
        world.barrier()  # the store may live in the first process
        world.destroy_process_group()
