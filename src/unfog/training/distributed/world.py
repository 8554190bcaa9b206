"""Several processes at one piece of work, as torchrun starts them: which one this is, and how they agree.

What a step needs goes through torch's process group. What may take long (drawing, measuring, saving, reading images)
is done by the first process while the others wait at torchrun's store, which bears a wait of any length as long as
everybody gives signs of life (`unfog.training.distributed.watchdog`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel

from unfog.errors import Interrupted, LostProcess, RequestError, RunError, UnfogError
from unfog.training.checkpoints.sharded import ShardStatusStore
from unfog.training.distributed.fsdp import ShardedState
from unfog.training.distributed.watchdog import Watchdog
from unfog.training.stability.out_of_memory import is_out_of_memory
from unfog.training.state import TrainState

POLL_SECONDS = 0.05  # seconds between two looks for what others have to say

T = TypeVar("T")


class World:
    """Which process this is (`rank`, from 0), and of how many (`size`). `World()` is one alone, and costs nothing."""

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None, vigil: Watchdog | None = None):
        self.rank, self.size = rank, size
        self._store, self._vigil = store, vigil
        self._said = self._met = 0  # messages of the first process, and barriers, so far
        self._begun = False
        self._sent, self._read = 0, dict[int, int]()  # reports, and those of each other process
        self._others: Store | None = None
        self._posts = 0
        self.shards: ShardedState | None = None

    @property
    def has_own_gpu(self) -> bool:
        """Whether each process of this machine has a GPU of its own."""
        return torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def init_process_group(self, device: torch.device, timeout: float) -> None:
        """Have tensors go between the processes from here on: by NCCL between GPUs, by gloo otherwise.

        Args:
            device: what this process computes on.
            timeout: seconds after which one that hangs ends the others.
        """
        if self._store is None or self._vigil is None or self._begun:
            return
        self.barrier()  # as what the first process did before may have taken longer than a process group waits
        self.set_phase("meeting")
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # NCCL wants a GPU for each; gloo takes what is there.
            backend = "cpu:gloo,cuda:nccl" if self.has_own_gpu else "gloo"
        patience = timedelta(seconds=1.5 * timeout + 30)  # so that the vigil, which knows more, speaks first
        group = PrefixStore("group", self._store)
        dist.init_process_group(backend, store=group, rank=self.rank, world_size=self.size, timeout=patience)
        self._vigil.timeout, self._begun = timeout, True

    def destroy_process_group(self) -> None:
        """Undo `begin`."""
        if self._begun:
            self._begun = False
            dist.destroy_process_group()

    @property
    def is_main(self) -> bool:
        """Whether this process speaks, records and saves for all."""
        return self.rank == 0

    def set_phase(self, phase: str, step: int = -1) -> None:
        """Note what this process is doing, for those who wait for it; costs nothing, so each step says it often."""
        if self._vigil is not None:
            self._vigil.at(phase, step)

    def batch_range(self, first: int, batch: int, rank: int | None = None) -> range:
        """The positions of a batch of images that are this process's, or another's: in order of rank, as even as can
        be."""
        rank = self.rank if rank is None else rank
        return range(first + batch * rank // self.size, first + batch * (rank + 1) // self.size)

    def shard_state(self, state: TrainState, saved: Path | None = None) -> None:
        """Give each process some rows of the first one's state, or of a checkpoint; see `Shards`."""
        self.shards = ShardedState(self, state, saved)

    def gather_ema(self, state: TrainState) -> None:
        """Leave the first process with the average, whole in its host memory; nothing is divided from here on."""
        if self.shards is not None:
            self.shards.gather(state, "ema")
            self.shards = None

    def new_shard_status_store(self) -> ShardStatusStore:
        """By which the processes that write a checkpoint together tell the first one; all ask for it at the same
        place, and speak of the same checkpoint."""
        assert self._store is not None
        if self._others is None:  # as a wait of the main thread would hold the connection that it shares
            self._others = self._store.clone()  # type: ignore[attr-defined]
        self._posts += 1
        return ShardStatusStore(self._others, f"parts/{self._posts}")

    def init_device(self, shard: bool, device: torch.device) -> torch.device | None:
        """Where a state is kept until it is divided: in host memory, and without values where it is not the first
        process's. None if it will not be.

        Raises:
            RequestError: processes that share a GPU cannot divide anything.
        """
        if not shard or self.size == 1:
            return None
        if device.type != "cpu" and not (device.type == "cuda" and self.has_own_gpu):
            raise RequestError(
                f"training.shard: {self.size} processes share {device.type}, and each needs a GPU of its own; start "
                "fewer with --nproc-per-node"
            )
        return torch.device("cpu" if self.is_main else "meta")

    def full_state(self, state: TrainState, *files: str) -> AbstractContextManager[None]:
        """Within, the first process has the state whole, however it is divided; arguments as of `Shards.whole`."""
        return nullcontext() if self.shards is None else self.shards.full_state(state, *files)

    def wrap_network(self, model: nn.Module, compress: str = "none") -> nn.Module:
        """What to call in place of the network, so that each backward pass leaves the sum over all processes, over
        `size`, in `.grad`, and outside `accumulating` only. The one place that knows how a network is divided.

        The network's weights must be the same everywhere: see `alike`. With `compress` "bf16", gradients are added up
        in that, at half the bytes.
        """
        if self.size == 1 or self.shards is not None:
            return model
        # Without a search for unused parameters, torch would make other buckets after the first step than in it, and
        # more than two processes would add in another order: a run that was interrupted would not repeat itself. It
        # also bears parameters that only some of the processes use.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of a name that older versions do not have yet
            network = DistributedDataParallel(
                model, broadcast_buffers=False, init_sync=False, find_unused_parameters=True
            )
        if compress == "bf16":
            # Not by its name, by which torch 2.13 refuses it without NCCL, although gloo adds up bf16 as well.
            network.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
        return network

    def accumulate_gradients(self, network: nn.Module, more: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a pass: with `more` to come, gradients are only added up here."""
        if more and isinstance(network, DistributedDataParallel):
            return network.no_sync()
        return nullcontext()

    @contextmanager
    def explain_out_of_memory(self, last: bool) -> Iterator[None]:
        """Around a forward or a backward pass; `last` is the one in which gradients are added up over all processes.

        Where the network is divided, that is each of them: what a pass leaves of a gradient takes as much memory as
        the weights, so each process keeps its rows only.

        Raises:
            RunError: it ran out of memory when others had begun to add theirs, so that it cannot be tried again.
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

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place; the same bits everywhere."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def run_on_main(self, phase: str, work: Callable[[], T]) -> T:
        """What `work`, which only the first process does, gives; the others wait and get it as JSON carries it.

        Raises:
            Interrupted, RunError: everywhere, if the first process did.
        """
        if self.size == 1:
            return work()
        self._said += 1
        key = f"said/{self._said}"
        if not self.is_main:
            self.set_phase(f"waiting for rank 0: {phase}")
            value: T = self._heard(key)
            return value
        self.set_phase(f"{phase} (rank 0 alone)")
        try:
            value = work()
        except BaseException as error:
            self._tell(key, _failure_message(error))
            raise
        self._tell(key, {"value": value})
        return value

    def broadcast_object(self, value: T) -> T:
        """What the first process gave here; a value that JSON holds."""
        return self.run_on_main("telling", lambda: value)

    def send_report(self, news: list[list[str]]) -> None:
        """Have the first process know something, some time; see `news`."""
        if self._store is not None and news:
            self._sent += 1
            self._store.set(f"news/{self.rank}/{self._sent}", json.dumps(news))

    def collect_reports(self) -> list[list[str]]:
        """For the first process: what the others have reported since the last call."""
        found: list[list[str]] = []
        for rank in range(1, self.size if self._store is not None else 1):
            while self._store is not None and self._store.check([f"news/{rank}/{self._read.get(rank, 0) + 1}"]):
                self._read[rank] = self._read.get(rank, 0) + 1
                found += json.loads(self._store.get(f"news/{rank}/{self._read[rank]}"))
        return found

    def announce_failure(self, error: BaseException) -> None:
        """Let the others know that the first process fails, should they wait for its word."""
        if self.is_main and self._store is not None:
            with contextlib.suppress(dist.DistError):
                self._tell(f"said/{self._said + 1}", _failure_message(error))

    def barrier(self) -> None:
        """Wait until all are here, however long that is."""
        if self._store is None:
            return
        self._met += 1
        self.set_phase("waiting for all")
        if self._store.add(f"met/{self._met}", 1) == self.size:
            self._store.set(f"all met/{self._met}", "")
        self._wait(f"all met/{self._met}")

    def broadcast_state(self, state: TrainState) -> None:
        """Give every process the first one's state: weights, averages, moments, and all the rest of it.

        Nothing where it is divided: its parts were dealt out together.
        """
        if self.size == 1 or self.shards is not None:
            return
        tensors = state.tensors()
        shapes = {f: {n: (list(t.shape), str(t.dtype)) for n, t in of.items()} for f, of in tensors.items()}
        sent = self.broadcast_object({"shapes": shapes, "progress": state.progress()})
        self.set_phase("sharing weights")
        for file, of in sent["shapes"].items():
            for name, (shape, dtype) in of.items():
                # In host memory, as the device may have no room for all of it twice.
                if self.is_main:
                    dist.broadcast(tensors[file][name].detach().to("cpu", copy=True).contiguous(), 0)
                else:
                    tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                    dist.broadcast(tensor, 0)
                    tensors.setdefault(file, {})[name] = tensor
        if not self.is_main:
            state.load_full({f: {n: tensors[f][n] for n in of} for f, of in sent["shapes"].items()}, sent["progress"])

    def _tell(self, key: str, message: dict[str, Any]) -> None:
        assert self._store is not None
        self._store.set(key, json.dumps(message, default=float))

    def _heard(self, key: str) -> Any:
        self._wait(key)
        assert self._store is not None
        message = json.loads(self._store.get(key))
        if "stopped" in message:
            raise Interrupted(message["stopped"])
        if "failed" in message:
            raise RunError(f"rank 0 failed: {message['failed']}")
        return message["value"]

    def _wait(self, key: str) -> None:
        assert self._store is not None
        pause = 0.001
        try:
            while not self._store.check([key]):
                time.sleep(pause)
                pause = min(2 * pause, POLL_SECONDS)
        except (dist.DistError, RuntimeError) as error:
            raise LostProcess(f"the process that holds torchrun's store is gone ({error})") from None


SINGLE_PROCESS = World()


def _failure_message(error: BaseException) -> dict[str, str]:
    """What the first process says to the others when it ends by this."""
    if isinstance(error, KeyboardInterrupt):
        return {"stopped": str(error)}
    return {"failed": str(error) if isinstance(error, UnfogError) else f"{type(error).__name__}: {error}"}


def is_lost_process(error: BaseException) -> bool:
    """Whether this is how torch says that another process is gone, or does not answer."""
    said = str(error).lower()
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in said or "nccl" in said)
