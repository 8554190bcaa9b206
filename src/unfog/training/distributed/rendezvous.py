"""How processes that torchrun has started find each other."""

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
from unfog.training.distributed.watchdog import Watchdog
from unfog.training.distributed.world import POLL_SECONDS, SINGLE_PROCESS, World
from unfog.training.settings import Training


def local_world_size() -> int:
    """How many processes torchrun has started here."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def world_size() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this is the process that speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def local_device(name: str) -> str:
    """The device of this process: where several share a machine, each gets a GPU of its own, as far as they go."""
    local = os.environ.get("LOCAL_RANK")
    if local is None or world_size() == 1 or name.partition(":")[0] not in ("auto", "cuda"):
        return name
    if not torch.cuda.is_available():
        return name
    return f"cuda:{int(local) % torch.cuda.device_count()}"


def processes_per_device(device: torch.device) -> int:
    """How many of the processes that torchrun has started here compute on this device, at the most."""
    devices = torch.cuda.device_count() if device.type == "cuda" else 1
    return -(-local_world_size() // devices)


def agree_on_name(store: Store, rank: int, size: int, timeout: float = Training.timeout) -> str:
    """A name that these processes, and no others, have in common: torchrun keeps its store when it restarts them.

    The first one says a name. The others answer under it with a token of their own, until they find that token in the
    first one's list, so that what an earlier attempt left there misleads nobody.

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
    """The processes that torchrun has started, or this one alone. All but the first are silent meanwhile.

    Args:
        timeout: seconds after which one that hangs ends the others.
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
        # On a connection of its own, as a wait of the main thread would hold the one that both had.
        vigil = stack.enter_context(Watchdog(rank, size, store.clone(), timeout))  # type: ignore[attr-defined]
        world = World(rank, size, store, vigil)
        try:
            yield world
        except BaseException as error:
            world.announce_failure(error)
            raise
        world.barrier()  # the store may live in the first process
        world.destroy_process_group()
