"""Trace the memory of a computation on fake tensors, which have shapes and no values.

The computation runs through PyTorch's dispatcher as always, but nothing is computed or allocated, so the trace of a
step that needs 100 GB takes a second and no memory. The dispatcher does not see what a kernel allocates inside; such
buffers are a few percent, which the margin of the micro-batch covers, and recovery from out-of-memory beyond it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from unfog.models import layers

ATEN = torch.ops.aten


@dataclass
class Trace:
    """Allocations and releases of a computation, in the order in which they happen."""

    sizes: list[int] = field(default_factory=list)
    """Bytes of each storage, by its number."""
    kinds: list[str] = field(default_factory=list)
    """Purpose of each storage, one of `peak_memory.PARTS`."""
    events: list[int] = field(default_factory=list)
    """n where storage n is allocated, and ~n, which is negative, where it is freed."""

    def extrapolate(self, batch: float, other: Trace, mine: int, its: int) -> Trace:
        """Extrapolate this trace, of batch size `mine`, and another of batch size `its`, to `batch`.

        This is exact, as every tensor is affine in the batch size.

        Raises:
            ValueError: the traces are of different computations.
        """
        if self._events_to_last_allocation() != other._events_to_last_allocation() or self.kinds != other.kinds:
            raise ValueError("the traces are of different computations")
        share = (batch - mine) / (its - mine)
        sizes = [max(0, round(a + share * (b - a))) for a, b in zip(self.sizes, other.sizes)]
        return Trace(sizes, self.kinds, self.events)

    def _events_to_last_allocation(self) -> list[int]:
        # The releases after it depend on the garbage collector.
        return self.events[: 1 + max((i for i, event in enumerate(self.events) if event >= 0), default=-1)]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        for tensor in _tensors_of(output):
            self._see(tensor)
        return output

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._live:
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


def _tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operation's output: one, a tuple or a list."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _tensors_of(part)


def record_trace(work: Callable[[Recorder], None], device: str, half: torch.dtype | None = None) -> Trace:
    """Return the trace of `work`, as on a device of this type.

    Args:
        work: builds what it needs; gets the recorder to name storages. It must not read values.
        device: "cpu", or another type, which is emulated on fake CPU tensors, as PyTorch cannot differentiate fake
            tensors of a missing device.
        half: the type that the autocast of the emulated device casts to.
    """
    recorder, attention = Recorder(), layers.attention
    clear_package_caches()
    try:
        with FakeTensorMode(), recorder, recorder.resizing():
            if device == "cpu":
                work(recorder)
            else:
                # Ours takes another path for 16-bit tensors on a CPU.
                layers.attention = torch.nn.functional.scaled_dot_product_attention  # type: ignore[assignment]
                with AutocastEmulation(half):
                    work(recorder)
    finally:
        layers.attention = attention
        clear_package_caches()  # real work must not find fake tensors there
    return recorder.trace


def clear_package_caches() -> None:
    """Empty the caches of this package's functions, which may hold tensors."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "unfog":
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


class AutocastEmulation(TorchFunctionMode):
    """Casts fake CPU tensors as autocast does on a GPU.

    The lists are those of the CUDA autocast, for the operations of our networks. The autocast of the CPU differs: it
    leaves group normalisation, whose output is kept for the backward pass, in 16 bits.
    """

    HALF: ClassVar[set[Any]] = {
        torch.nn.functional.linear,
        torch.nn.functional.scaled_dot_product_attention,
        torch.conv2d,
        torch.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
    }
    FULL: ClassVar[set[Any]] = {
        torch.nn.functional.group_norm,
        torch.nn.functional.layer_norm,
        torch.nn.functional.softmax,
        Tensor.softmax,
    }

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
        # Operations without gradients are those of the optimiser, which runs outside autocast.
        if self.half is not None and torch.is_grad_enabled() and (func in self.HALF or func in self.FULL):
            to = self.half if func in self.HALF else torch.float32
            args = tuple(_cast(value, to) for value in args)
            kwargs = {name: _cast(value, to) for name, value in kwargs.items()}
        if func is torch.nn.functional.scaled_dot_product_attention:
            # It keeps what the GPU kernel keeps; 16-bit CPU tensors would take another path.
            return ATEN._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)[0]
        return func(*args, **kwargs)


def _cast(value: Any, to: torch.dtype) -> Any:
    return value.to(to) if isinstance(value, Tensor) and value.is_floating_point() else value
