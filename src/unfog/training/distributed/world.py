"""Data-parallel training: how the network and the batch are distributed over the ranks."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from unfog.errors import RequestError, RunError
from unfog.training.checkpoints.writer import ShardStatusStore
from unfog.training.distributed.fsdp import ShardedState, broadcast_tensor, tensor_shapes
from unfog.training.distributed.process_group import (
    ProcessGroup,
    agree_on_gpus,
    agree_on_name,
    local_world_size,
    world_size,
)
from unfog.training.distributed.watchdog import Watchdog
from unfog.training.settings import Training
from unfog.training.stability.out_of_memory import is_out_of_memory
from unfog.training.state import TrainState


class World(ProcessGroup):
    """The ranks that train together, with a network that is replicated (DDP) or sharded (FSDP2)."""

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None, watchdog: Watchdog | None = None):
        super().__init__(rank, size, store, watchdog)
        self._status_store: Store | None = None
        self._saves = 0
        self.shards: ShardedState | None = None

    def batch_range(self, first: int, batch: int, rank: int | None = None) -> range:
        """Return the positions of a batch that this rank, or another, computes: in order of rank, evenly."""
        rank = self.rank if rank is None else rank
        # Products before the division, so that the shares cover the batch without a gap whatever its size.
        return range(first + batch * rank // self.size, first + batch * (rank + 1) // self.size)

    def init_device(self, shard: bool, device: torch.device) -> torch.device | None:
        """Return where a state that will be sharded is built: rank 0's host memory, "meta" elsewhere; else None.

        Raises:
            RequestError: ranks share a GPU, so that nothing can be sharded.
        """
        if not shard or self.size == 1:
            return None
        if device.type != "cpu" and not (device.type == "cuda" and self.has_own_gpu):
            raise RequestError(
                f"training.shard: {self.size} processes share {device.type}, but each needs a separate GPU; start "
                "fewer with --nproc-per-node"
            )
        return torch.device("cpu" if self.is_main else "meta")

    def shard_state(self, state: TrainState, saved: Path | None = None) -> None:
        """Shard rank 0's state, or a checkpoint, over the ranks; see `ShardedState`."""
        self.shards = ShardedState(self, state, saved)

    def full_state(self, state: TrainState, *files: str) -> AbstractContextManager[None]:
        """Return a context in which rank 0 has the full state; arguments as of `ShardedState.full_state`."""
        return nullcontext() if self.shards is None else self.shards.full_state(state, *files)

    def gather_ema(self, state: TrainState) -> None:
        """Leave rank 0 with the full EMA in host memory. Nothing is sharded from here on."""
        if self.shards is not None:
            self.shards.gather(state, "ema")
            self.shards = None

    def new_shard_status_store(self) -> ShardStatusStore:
        """Return the store for the status of one checkpoint's shard files. All ranks call this at the same place."""
        assert self._store is not None
        if self._status_store is None:
            # A connection of its own, because a wait of the main thread holds the one that it uses.
            self._status_store = self._store.clone()  # type: ignore[attr-defined]
        self._saves += 1
        return ShardStatusStore(self._status_store, f"parts/{self._saves}")

    def wrap_network(self, model: nn.Module, compress: str = "none") -> nn.Module:
        """Return a module that averages gradients over the ranks in the last backward pass of a step.

        Its weights must be the same on all ranks: see `broadcast_state`. A network that is sharded, or of a single
        process, is returned as it is. `compress`="bf16" all-reduces gradients in bfloat16, at half the bytes.
        """
        if self.size == 1 or self.shards is not None:
            return model
        # Without the search for unused parameters, DDP rebuilds its buckets after the first step. Three or more ranks
        # would then add in another order, and an interrupted run would not repeat itself. The search also allows
        # parameters that only some ranks use.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of init_sync, whose new name older versions lack
            network = DistributedDataParallel(
                model, broadcast_buffers=False, init_sync=False, find_unused_parameters=True
            )
        if compress == "bf16":
            # Through a lambda: torch 2.13 refuses the hook itself without NCCL, although gloo can add bf16.
            network.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
        return network

    def accumulate_gradients(self, network: nn.Module, more: bool) -> AbstractContextManager[Any]:
        """Return a context for a micro-batch: with `more` to come, gradients are added up on each rank only."""
        if more and isinstance(network, DistributedDataParallel):
            return network.no_sync()
        return nullcontext()

    @contextmanager
    def explain_out_of_memory(self, last: bool) -> Iterator[None]:
        """Make out-of-memory errors final in a pass that takes part in a collective, as others wait in it.

        With DDP that is the `last` backward pass of a step; a sharded network communicates in every pass.

        Raises:
            RunError: memory did not suffice, and the pass cannot be repeated.
        """
        try:
            yield
        except Exception as error:
            if self.size == 1 or not (last or self.shards) or not is_out_of_memory(error):
                raise
            raise RunError(
                f"rank {self.rank} ran out of memory in a pass in which the others wait for it; go on with a smaller "
                "--microbatch, which takes as many passes as it needs for the same batch"
            ) from error

    def broadcast_state(self, state: TrainState) -> None:
        """Give every rank rank 0's state. Nothing to do if it is sharded, as shards are loaded together."""
        if self.size == 1 or self.shards is not None:
            return
        tensors = state.tensors()
        sent: dict[str, Any] = self.broadcast_object({"shapes": tensor_shapes(tensors), "progress": state.progress()})
        self.set_phase("sharing weights")
        found: dict[str, dict[str, torch.Tensor]] = {file: {} for file in sent["shapes"]}
        for file, of in sent["shapes"].items():
            for name, (shape, dtype) in of.items():
                tensor = broadcast_tensor(tensors[file][name] if self.is_main else None, shape, dtype)
                if not self.is_main:  # which would only hold a second copy
                    found[file][name] = tensor
        if not self.is_main:
            state.load_full(found, sent["progress"])


SINGLE_PROCESS = World()


@contextlib.contextmanager
def init_world(timeout: float = Training.timeout) -> Iterator[World]:
    """Return a context with the ranks that torchrun has started, or a single process. Only rank 0 writes to stderr.

    A rank that hangs for `timeout` seconds ends the others.
    """
    if world_size() == 1:
        yield SINGLE_PROCESS
        return
    if "OMP_NUM_THREADS" not in os.environ:
        # Each process would start a thread for every core of the machine.
        torch.set_num_threads(max(1, torch.get_num_threads() // local_world_size()))
    shared, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=Training.timeout)))
    store = PrefixStore(f"unfog/{agree_on_name(shared, rank, size)}", shared)
    agree_on_gpus(store, rank, size)
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
        world.leave()
