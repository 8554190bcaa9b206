"""Several processes at one evaluation, as torchrun starts them. They share the run folder, and draw in turns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(days=7)
"""How long one process waits for another: until torchrun ends it, as the others may have hours more to draw."""


@dataclass(frozen=True)
class Ranks:
    """Which process this is, and of how many."""

    rank: int = 0
    world: int = 1

    def barrier(self) -> None:
        """Wait until all are here."""
        if self.world > 1:
            dist.barrier()


def first() -> bool:
    """Whether this is the process that speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def device_of(name: str) -> str:
    """The device of this process: where one is chosen for it, each on a machine gets a GPU of its own."""
    local = os.environ.get("LOCAL_RANK")
    if local is None or name not in ("auto", "cuda") or not torch.cuda.is_available():
        return name
    return f"cuda:{int(local) % torch.cuda.device_count()}"


@contextlib.contextmanager
def ranks() -> Iterator[Ranks]:
    """The processes that torchrun has started, or this one alone. All but the first are silent meanwhile."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        rank = dist.get_rank()
        with contextlib.ExitStack() as stack:
            if rank > 0:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stderr(nowhere))
            yield Ranks(rank, world)
    finally:
        dist.destroy_process_group()
