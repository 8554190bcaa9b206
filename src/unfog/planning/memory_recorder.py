"""Recorder of the memory of a computation on fake tensors, which have shapes and no values; the peak of its trace.

The computation runs through PyTorch's dispatcher as always, but nothing is computed or allocated, so the trace of a
step that needs 100 GB takes a second and no memory. The dispatcher does not see what a kernel allocates inside; such
buffers are a few percent, which the margin of the micro-batch covers, and recovery from out-of-memory beyond it.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unfog.errors import RequestError
from unfog.models import layers
from unfog.models.group_norm import group_norm, is_channels_last

_ATEN = torch.ops.aten
MB = 2**20
# glibc maps larger blocks one by one and unmaps them at once (malloc.c, DEFAULT_MMAP_THRESHOLD_MAX).
_HEAP_LIMIT = 32 * MB

# Gaps in the heap of a CPU process, as a share of the temporary tensors up to _HEAP_LIMIT: a freed block stays resident
# between others, and is often a little too small for the next. With it, predictions are within 15% of the peaks that
# benchmarks/plan/measure_peaks.py measured; repeats of one configuration vary by up to 12%.
HOLES = 0.30
HOLES_RECOMPUTING = 1.3  # with gradient checkpointing, under which blocks of many sizes take turns

ONEDNN_HALF = 17 * MB  # buffers that oneDNN keeps after computing in bf16 on a CPU; measured with one thread

# Allocated once at the beginning, so that the heap has no holes there.
_LASTING = ("parameters", "average", "moments", "exchange", "library")

_CUDA_BLOCK = 512  # bytes that PyTorch's CUDA allocator rounds up to
# CUDA context, kernels and handles of a process, 300 to 700 MB; not measured here. Only subtracted for a card that is
# not at hand: the free memory that the driver reports is without it.
CUDA_CONTEXT = 500 * MB
# Workspace of cuDNN, and cuBLAS's 8 to 32 MB. Deterministic kernels seldom need more. Not measured.
CUDNN_WORKSPACE = 64 * MB

# Parts of a peak. "gathered": blocks of a sharded network that are whole at the moment; "exchange": gradient buckets;
# "workspace": temporary tensors; "library": buffers of kernels; "allocator": gaps between blocks.
PARTS = (
    *("parameters", "gathered", "gradients", "exchange", "moments", "average", "activations", "workspace", "library"),
    "allocator",
)


@dataclass
class Trace:
    """Allocations and releases of a computation, in the order in which they happen."""

    sizes: list[int] = field(default_factory=list)
    """Bytes of each storage, by its number."""
    kinds: list[str] = field(default_factory=list)
    """Purpose of each storage, one of PARTS."""
    events: list[int] = field(default_factory=list)
    """n where storage n is allocated, and ~n, which is negative, where it is freed."""

    def extrapolate(self, batch: float, other: Trace, mine: int, its: int) -> Trace:
        """Extrapolate this trace, of batch size `mine`, and another of batch size `its`, to `batch`.

        This is exact, as every tensor is affine in the batch size. ValueError if the traces are of different
        computations.
        """
        if self._events_to_last_allocation() != other._events_to_last_allocation() or self.kinds != other.kinds:
            raise ValueError("the traces are of different computations")
        share = (batch - mine) / (its - mine)
        sizes = [max(0, round(a + share * (b - a))) for a, b in zip(self.sizes, other.sizes)]
        return Trace(sizes, self.kinds, self.events)

    def _events_to_last_allocation(self) -> list[int]:
        # The releases after it depend on the garbage collector.
        return self.events[: 1 + max((i for i, event in enumerate(self.events) if event >= 0), default=-1)]

    def peak(self, device: str, holes: float = HOLES) -> Peak:
        """Return the peak of a trace on a device of this type, without the CUDA context."""
        cost = [_allocated_bytes(size, kind, device, holes) for size, kind in zip(self.sizes, self.kinds)]
        live = highest = 0.0
        where = 0
        for place, event in enumerate(self.events):
            if event >= 0:
                live += cost[event]
                if live > highest:
                    highest, where = live, place
            else:
                live -= cost[~event]
        # Again up to the peak, as the loop above keeps sums and no members.
        alive: set[int] = set()
        for event in self.events[: where + 1]:
            (alive.add if event >= 0 else alive.discard)(event if event >= 0 else ~event)
        parts = Counter(dict.fromkeys(PARTS, 0))
        for number in alive:
            parts[self.kinds[number]] += self.sizes[number]
        parts["library"] += CUDNN_WORKSPACE if device == "cuda" else 0
        total = round(highest) + (CUDNN_WORKSPACE if device == "cuda" else 0)
        parts["allocator"] = total - sum(parts.values())
        return Peak(total, dict(parts))

    @classmethod
    def record(cls, work: Callable[[MemoryRecorder], None], device: str, half: torch.dtype | None = None) -> Trace:
        """Return the trace of `work`, which builds what it needs, names storages by the recorder, and reads no values.

        A device other than "cpu" is emulated on fake CPU tensors, as PyTorch cannot differentiate fake tensors of a
        missing device. `half` is the type that its autocast casts to.
        """
        recorder, attention = MemoryRecorder(), layers.attention
        clear_package_caches()
        try:
            with FakeTensorMode(), recorder, recorder.resizing():
                if device != "cpu":
                    # Ours takes another path for 16-bit tensors on a CPU.
                    layers.attention = F.scaled_dot_product_attention  # type: ignore[assignment]
                with nullcontext() if device == "cpu" else _AutocastEmulation(half):
                    work(recorder)
        finally:
            layers.attention = attention
            clear_package_caches()  # real work must not find fake tensors there
        return recorder.trace


class MemoryRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a `Trace` of the operations inside its `with`; to be entered after a `FakeTensorMode`.

    `kind` is the purpose of new storages, until `name` changes it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.kind = "workspace"
        self._live: dict[int, int] = {}  # address of the storage -> its number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor dispatches again with its local shard
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return output

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._live:  # a view has the storage of its base
            self._live[address] = self.allocate(storage.nbytes(), self.kind)
            weakref.finalize(storage, self._free, address)

    def allocate(self, size: int, kind: str) -> int:
        """Record a storage that is never freed, and return its number."""
        trace = self.trace
        trace.sizes.append(size)
        trace.kinds.append(kind)
        trace.events.append(len(trace.sizes) - 1)
        return len(trace.sizes) - 1

    def begin(self) -> None:
        """Forget all storages that are freed already."""
        self.trace.events[:] = sorted(self._live.values())

    def _free(self, address: int) -> None:
        self.trace.events.append(~self._live.pop(address))

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Record changes of the size of a storage, by which FSDP gathers and frees the blocks of a sharded network."""
        resize = torch.UntypedStorage.resize_

        def recording(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if (number := self._live.get(storage._cdata)) is not None:
                self.trace.events.append(~number)
                self._live[storage._cdata] = self.allocate(size, "gathered")

        torch.UntypedStorage.resize_ = recording  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def name(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Set the purpose of the storages of these tensors."""
        for tensor in tensors:
            if tensor is not None:
                self.trace.kinds[self._live[tensor.untyped_storage()._cdata]] = kind

    @contextmanager
    def keeping(self, kind: str) -> Iterator[None]:
        """Set the purpose of storages that are allocated inside, alive at the end and not named yet."""
        first = len(self.trace.sizes)
        yield
        for number in self._live.values():
            if number >= first and self.trace.kinds[number] == self.kind:
                self.trace.kinds[number] = kind


def clear_package_caches() -> None:
    """Empty the caches of this package's functions, which may hold tensors."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "unfog":
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


class _AutocastEmulation(TorchFunctionMode):
    """Casts fake CPU tensors as autocast does on a GPU.

    The lists are those of the CUDA autocast, for the operations of our networks. The autocast of the CPU differs: it
    leaves group normalisation, whose output is kept for the backward pass, in 16 bits.
    """

    HALF: ClassVar[set[Any]] = {
        *(F.linear, F.scaled_dot_product_attention, torch.conv2d),
        *(torch.matmul, Tensor.matmul, Tensor.__matmul__),
    }
    FULL: ClassVar[set[Any]] = {F.group_norm, F.layer_norm, F.softmax, Tensor.softmax}

    def __init__(self, half: torch.dtype | None):
        super().__init__()
        self.half = half

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            # Gradient checkpointing calls functions in there, and a mode is off while it handles one. The engine is
            # called directly, because torch's wrappers around it would come back here.
            with self:
                first = torch.ones((), dtype=args[0].dtype)
                engine = torch.autograd.Variable._execution_engine
                return engine.run_backward((args[0],), (first,), False, False, (), True, True)
        if func is F.group_norm and self.half is not None and is_channels_last(args[0]):
            return group_norm(*args, **kwargs)  # which layers of ours call on CUDA
        # Operations without gradients are those of the optimiser, which runs outside autocast.
        if self.half is not None and torch.is_grad_enabled() and (func in self.HALF or func in self.FULL):
            to = self.half if func in self.HALF else torch.float32
            args = tuple(_cast(value, to) for value in args)
            kwargs = {name: _cast(value, to) for name, value in kwargs.items()}
        if func is F.scaled_dot_product_attention:
            # It keeps what the GPU kernel keeps; 16-bit CPU tensors would take another path.
            return _ATEN._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)[0]
        return func(*args, **kwargs)


def _cast(value: Any, to: torch.dtype) -> Any:
    return value.to(to) if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def fake_process_group(processes: int) -> Iterator[None]:
    """Make torch believe that this is rank 0 of so many processes; messages go nowhere.

    RequestError if this process is in a real process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the import registers the backend

    if dist.is_initialized():
        raise RequestError(
            "the memory of a sharded network cannot be predicted while torch.distributed is in use; call "
            "destroy_process_group first"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Peak:
    """Peak memory of a computation in bytes, and the parts that it consists of."""

    total: int
    parts: Mapping[str, int]
    """Bytes by PARTS, which add up to the total."""


def _allocated_bytes(size: int, kind: str, device: str, holes: float) -> float:
    """Return the bytes that the allocator takes for a storage."""
    if device != "cpu":
        return -(-size // _CUDA_BLOCK) * _CUDA_BLOCK
    return size if size > _HEAP_LIMIT or kind in _LASTING else size * (1 + holes)
