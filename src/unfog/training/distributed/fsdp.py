"""Sharded training state for networks that do not fit one device: torch's FSDP2.

Each rank holds some rows of every weight, gradient, EMA and optimiser moment. The weights of a block are gathered for
its forward and its backward pass and freed after each. Every rank writes and reads its rows of a checkpoint (see
`checkpoints.writer`). For samples and evaluation rank 0 gathers the full EMA in host memory, one tensor at a time, so
that no device ever holds more than one full tensor for it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unfog.training.checkpoints.load import load_tensors
from unfog.training.distributed.process_group import ProcessGroup
from unfog.training.ema import Ema
from unfog.training.sharded_tensors import is_sharded, to_local
from unfog.training.state import TrainState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# By file (model, ema, optimizer), then by name, as returned by `TrainState.tensors`.
_Tensors = Mapping[str, Mapping[str, Tensor]]
# Shapes and dtypes of such tensors.
Shapes = Mapping[str, Mapping[str, tuple[list[int], str]]]


class ShardedState:
    """Shards a state over the ranks. Every method is a collective.

    Args:
        world: ranks whose process group is initialised.
        state: full in rank 0's host memory, without values elsewhere. Sharded from here on.
        saved: checkpoint folder, given on rank 0, of which each rank reads its rows; None takes `state`'s values.

    Raises:
        RunError: a rank does not see the checkpoint.
    """

    def __init__(self, world: ProcessGroup, state: TrainState, saved: Path | None = None):
        self.world = world
        tensors = state.tensors() if world.is_main and saved is None else {}
        shapes = tensor_shapes(tensors)
        sent: dict[str, Any] = {"saved": saved and str(saved), "shapes": shapes, "progress": state.progress()}
        sent = world.broadcast_object(sent)
        state.model.to("meta")
        self._empty = copy.deepcopy(state.model)
        device = state.precision.device.type
        shard_network(state.model, build_mesh(device, world.size), gathers_in_bf16(state.precision.name, device))
        state.model.to_empty(device=state.precision.device)
        # Built anew: the old one holds the parameters from before they were sharded, which are empty now.
        state.optimizer = state.build_optimizer(state.model)
        state.ema = Ema(state.model, state.ema.schedule)
        state.second_ema = state.second_ema and Ema(state.model, state.second_ema.schedule)
        state.in_host_memory = False
        world.set_phase("sharing weights")
        if sent["saved"] is None:
            state.load_full(self._scatter_tensors(state, tensors, sent["shapes"]), sent["progress"])
        else:
            load_tensors(Path(sent["saved"]), state)
            state.load_progress(sent["progress"])

    def reduce_unsharded_gradients(self, model: nn.Module) -> None:
        """Average the gradients that FSDP2 does not: those of parameters that are not sharded."""
        # May be repeated after another pass: the mean of equal numbers leaves what was averaged before as it is.
        for parameter in model.parameters():
            if not is_sharded(parameter) and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world.size

    @contextmanager
    def full_state(self, state: TrainState, *files: str) -> Iterator[None]:
        """Within the context, rank 0's `state` is full and in host memory. No rank may train it there.

        `files` are the tensors to gather: "model", "ema" or "ema2". Others are not usable; a network whose own weights
        are not gathered gets those of the EMA.
        """
        before = state.model, state.ema, state.second_ema
        self.gather(state, *files)
        try:
            yield
        finally:
            state.model, state.ema, state.second_ema = before

    def gather(self, state: TrainState, *files: str) -> None:
        """Replace network and EMAs by full ones in rank 0's host memory; arguments as of `full_state`."""
        found = self._gather_tensors(state, files)
        if not self.world.is_main:
            return
        ema = found.get("ema") or found["model"]
        model = copy.deepcopy(self._empty).train(state.model.training)
        model.load_state_dict(found.get("model", ema), assign=True)
        state.ema = state.ema.with_tensors(model, ema)
        state.second_ema = state.second_ema and state.second_ema.with_tensors(model, found.get("ema2", ema))
        state.model = model

    def _gather_tensors(self, state: TrainState, files: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
        """Return full tensors in host memory on rank 0, and nothing on the others."""
        self.world.set_phase("gathering weights")
        found: dict[str, dict[str, Tensor]] = {}
        for file, tensors in state.tensors().items():
            for name, tensor in tensors.items() if file in files else ():
                full = full_tensor(tensor)  # freed before the next one is gathered, as a device has no room for two
                if self.world.is_main:
                    found.setdefault(file, {})[name] = full.to("cpu", copy=full is tensor).contiguous()
        return found

    def _scatter_tensors(self, state: TrainState, tensors: _Tensors, shapes: Shapes) -> dict[str, dict[str, Tensor]]:
        """Scatter rank 0's full tensors by rows; broadcast those that are not sharded."""
        parameters = dict(state.model.named_parameters())
        rows: dict[str, dict[str, Tensor]] = {file: {} for file in ("optimizer", *shapes)}
        for file, of in shapes.items():
            for full, (shape, dtype) in of.items():
                like = parameters.get(full.partition("/")[2] if file == "optimizer" else full)
                tensor = tensors[file][full] if self.world.is_main else None
                if like is not None and is_sharded(like) and shape == list(like.shape):
                    rows[file][full] = _scatter_rows(tensor, like)
                else:
                    rows[file][full] = broadcast_tensor(tensor, shape, dtype)
        return rows


def tensor_shapes(tensors: _Tensors) -> Shapes:
    """Return shape and dtype of each tensor, as JSON can hold them."""
    return {f: {n: (list(t.shape), str(t.dtype)) for n, t in of.items()} for f, of in tensors.items()}


def broadcast_tensor(tensor: Tensor | None, shape: list[int], dtype: str) -> Tensor:
    """Return rank 0's tensor (None elsewhere) on every rank, in host memory."""
    # Not on the device, which may have no room for a second copy.
    if tensor is None:
        host = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    else:
        host = tensor.detach().cpu().contiguous()
    dist.broadcast(host, 0)
    return host


def build_mesh(device: str, size: int) -> DeviceMesh:
    """Return a one-dimensional mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh  # takes a second, which only sharding needs

    return init_device_mesh(device, (size,))


def gathers_in_bf16(precision: str, device: str) -> bool:
    """Return whether blocks are gathered in bf16: autocast would cast them anyway, and it halves the bytes."""
    return precision == "bf16" and device == "cuda"


def shard_network(model: nn.Module, mesh: DeviceMesh, half: bool) -> None:
    """Shard a network by rows: each of its blocks, which are gathered one by one, and the layers around them.

    Scalars, which have no rows, stay whole on every rank. `half` gathers blocks in bf16; see `gathers_in_bf16`.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Without casting inputs: noise levels suffer from bfloat16.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if half else None
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    scalars = {p for p in model.parameters() if p.ndim == 0}
    # Blocks first, then the whole: what is left for the outer call are the layers around them.
    for block in shardable_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy or exact, ignored_params=scalars)
    fully_shard(model, mesh=mesh, mp_policy=exact, ignored_params=scalars)


def shardable_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the class that the network names as its block; [] if it names no class."""
    kind = getattr(model, "block", ())
    return [module for module in model.modules() if isinstance(module, kind)]


def compile_blocks(model: nn.Module) -> None:
    """Compile each block of a network that is going to be sharded."""
    # Gathering a block's weights cannot be part of a graph. Compiling the whole network would break the graph at each
    # block, and equal blocks would not share their code.
    from torch import _dynamo as dynamo  # takes seconds, which only compiling needs

    blocks = shardable_blocks(model) or [model]  # an autoencoder is sharded as one
    # Blocks share a forward function, of which torch gives up after eight versions; allow as many for each block.
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, 8 * len(blocks))
    for block in blocks:
        block.compile(dynamic=False)  # blocks differ in shape, which must not lead to code for dynamic shapes


def _scatter_rows(tensor: Tensor | None, like: Tensor) -> Tensor:
    """Scatter the rows of rank 0's full tensor (None elsewhere) over the ranks, as `like` is sharded."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    mine, size = to_local(like), like.device_mesh.size()
    rows = -(-len(like) // size)  # FSDP2 rounds up, so the last ranks may hold fewer rows, or none
    own, parts = torch.empty(rows, *like.shape[1:], dtype=like.dtype), None
    if tensor is not None:
        # A scatter sends equal pieces, and the last ranks may hold fewer rows.
        padded = torch.zeros(rows * size, *like.shape[1:], dtype=tensor.dtype)
        padded[: len(tensor)] = tensor.cpu()
        parts = list(padded.to(like.dtype).chunk(size))
    dist.scatter(own, parts)
    return DTensor.from_local(
        own[: len(mine)].to(mine.device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather all rows of a tensor on every rank. A collective if the tensor is sharded."""
    return cast(Any, tensor.detach()).full_tensor() if is_sharded(tensor) else tensor
