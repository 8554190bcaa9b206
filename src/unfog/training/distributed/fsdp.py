"""A training state divided among processes, for networks that do not fit one device: torch's FSDP2.

Each process holds some rows of every weight, gradient, average and moment. A block's weights are brought together for
its forward and its backward pass, and let go after each. Checkpoints are written and read by all, each its rows (see
`joint`). What the first process draws and measures alone it does with a whole copy of the average in its host memory,
gathered tensor by tensor, so that no device ever holds more than one of them whole for it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unfog.training.checkpoints import format as checkpoint
from unfog.training.ema import Ema
from unfog.training.sharded_tensors import full_tensor, is_sharded, to_local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from unfog.training.distributed.world import World
    from unfog.training.state import TrainState

Tensors = Mapping[str, Mapping[str, Tensor]]
"""By file (model, ema, optimizer), then by name, as `TrainState.tensors` gives them."""
Shapes = Mapping[str, Mapping[str, tuple[list[int], str]]]
"""Of such tensors, and their dtypes."""


class ShardedState:
    """The rows that this process has of a state.

    Every method is called by all processes at the same place.

    Args:
        world: that has begun.
        state: whole in the first one's host memory; what the others have in it does not count. Divided from here on.
        saved: a checkpoint whose tensors it gets, for the first process to say: each reads its rows.

    Raises:
        RunError: a process does not see the checkpoint.
    """

    def __init__(self, world: World, state: TrainState, saved: Path | None = None):
        self.world = world
        tensors = state.tensors() if world.is_main and saved is None else {}
        shapes = {f: {n: (list(t.shape), str(t.dtype)) for n, t in of.items()} for f, of in tensors.items()}
        told: dict[str, Any] = {"saved": saved and str(saved), "shapes": shapes, "progress": state.progress()}
        told = world.broadcast_object(told)
        state.model.to("meta")
        self._empty = copy.deepcopy(state.model)
        device = state.precision.device.type
        shard_network(state.model, build_mesh(device, world.size), gathers_in_bf16(state.precision.name, device))
        state.model.to_empty(device=state.precision.device)
        state.optimizer = state.build_optimizer(state.model)
        state.ema = Ema(state.model, state.ema.schedule)
        state.second_ema = state.second_ema and Ema(state.model, state.second_ema.schedule)
        state.in_host_memory = False
        world.set_phase("sharing weights")
        if told["saved"] is None:
            state.load_full(self._scatter_tensors(state, tensors, told["shapes"]), told["progress"])
        else:
            checkpoint.load_tensors(Path(told["saved"]), state)
            state.load_progress(told["progress"])

    def reduce_unsharded_gradients(self, model: nn.Module) -> None:
        """Average the gradients of what is not divided, after the backward pass has done so with the others.

        Once more after another pass leaves what was averaged before as it is.
        """
        for parameter in model.parameters():
            if not is_sharded(parameter) and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world.size

    @contextmanager
    def full_state(self, state: TrainState, *files: str) -> Iterator[None]:
        """Within, the state is whole in the first process's host memory, and nobody's to train.

        Args:
            files: the tensors that are wanted, "model" or averages; what is not asked for is not looked at. A network
                whose own are not gets the average.
        """
        kept = state.model, state.ema, state.second_ema
        self.gather(state, *files)
        try:
            yield
        finally:
            state.model, state.ema, state.second_ema = kept

    def gather(self, state: TrainState, *files: str) -> None:
        """Make network and averages whole in the first process's host memory, for good; arguments as of `whole`."""
        found = self._gather_tensors(state, files)
        if not self.world.is_main:
            return
        # What is not asked for is not looked at, and gets what there is.
        average = found.get("ema") or found["model"]
        model = copy.deepcopy(self._empty).train(state.model.training)
        model.load_state_dict(found.get("model", average), assign=True)
        state.ema = state.ema.with_tensors(model, average)
        state.second_ema = state.second_ema and state.second_ema.with_tensors(model, found.get("ema2", average))
        state.model = model

    def _gather_tensors(self, state: TrainState, files: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
        """Copies in host memory, for the first process; nothing for the others, who hold one tensor at a time."""
        self.world.set_phase("gathering weights")
        found: dict[str, dict[str, Tensor]] = {}
        for file, tensors in state.tensors().items():
            for name, tensor in tensors.items() if file in files else ():
                together = full_tensor(tensor)
                if self.world.is_main:
                    found.setdefault(file, {})[name] = together.to("cpu", copy=together is tensor).contiguous()
        return found

    def _scatter_tensors(self, state: TrainState, tensors: Tensors, shapes: Shapes) -> dict[str, dict[str, Tensor]]:
        """Of what the first process has whole, the rows of each; all of what is not divided."""
        parameters = dict(state.model.named_parameters())
        rows: dict[str, dict[str, Tensor]] = {file: {} for file in ("optimizer", *shapes)}
        for file, of in shapes.items():
            for full, (shape, dtype) in of.items():
                like = parameters.get(full.partition("/")[2] if file == "optimizer" else full)
                tensor = tensors[file][full].cpu().contiguous() if self.world.is_main else None
                if like is not None and is_sharded(like) and shape == list(like.shape):
                    rows[file][full] = _scatter_rows(tensor, like)
                else:
                    alike = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
                    rows[file][full] = alike if tensor is None else tensor
                    dist.broadcast(rows[file][full], 0)
        return rows


def build_mesh(device: str, size: int) -> DeviceMesh:
    """All processes, side by side."""
    from torch.distributed.device_mesh import init_device_mesh  # a second of import, for those who divide only

    return init_device_mesh(device, (size,))


def gathers_in_bf16(precision: str, device: str) -> bool:
    """Whether blocks are brought together in bf16: what autocast would make of their weights is made before they are
    sent, which halves the bytes."""
    return precision == "bf16" and device == "cuda"


def shard_network(model: nn.Module, mesh: DeviceMesh, half: bool) -> None:
    """Divide a network by rows: each of its blocks, which are brought together one by one, and what is around them.

    Numbers, which have no rows, stay whole everywhere.

    Args:
        half: see `sent_in_half`.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # The inputs stay what they are: noise levels suffer from bfloat16.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if half else None
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    numbers = {p for p in model.parameters() if p.ndim == 0}
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy or exact, ignored_params=numbers)
    fully_shard(model, mesh=mesh, mp_policy=exact, ignored_params=numbers)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The parts that a network is divided by."""
    kind = getattr(model, "block", ())
    return [module for module in model.modules() if isinstance(module, kind)]


def compile_blocks(model: nn.Module) -> None:
    """Have torch.compile make code of each block of a network that is going to be divided.

    Not of the whole: bringing a block's weights together is no part of a graph, so that would break at each block, and
    blocks that are alike would not share what is compiled.
    """
    from torch import _dynamo as dynamo  # seconds of import, for those who compile only

    blocks = _blocks(model) or [model]  # a codec is divided as one
    # They share a function, whose versions torch counts and gives up at eight; each block may have so many.
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, 8 * len(blocks))
    for block in blocks:
        block.compile(dynamic=False)  # blocks differ in shape, which is not to make code for any shape


def _scatter_rows(tensor: Tensor | None, like: Tensor) -> Tensor:
    """The rows of a tensor that are this process's, as `like` is divided.

    Args:
        tensor: whole, in host memory, at the first process; None elsewhere.
    """
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    mine, size = to_local(like), like.device_mesh.size()
    rows = -(-len(like) // size)  # as FSDP2 divides: the last ones may have fewer, or none
    own, parts = torch.empty(rows, *like.shape[1:], dtype=like.dtype), None
    if tensor is not None:
        padded = tensor.new_zeros(rows * size, *like.shape[1:])
        padded[: len(tensor)] = tensor
        parts = list(padded.to(like.dtype).chunk(size))
    dist.scatter(own, parts)
    return DTensor.from_local(
        own[: len(mine)].to(mine.device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
