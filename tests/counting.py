"""What the tests of costs count: torch operations, new tensors and waits for the device, by what they are for."""

from collections import Counter
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = tuple(f"aten::{n}" for n in ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero"))
READS = ("tolist", "numpy", "cpu", "__array__")
"""Methods of a tensor that wait for the device, and do nothing on a CPU."""


class Counting(TorchDispatchMode):
    """Counts inside its `with`; `during` says what for, and `wrap` has what a method does counted as its own.

    Views count as operations: each costs the host as much as a kernel to launch.
    """

    def __init__(self):
        super().__init__()
        self.phase, self.operations, self.named = "loop", Counter(), {}
        self.tensors, self.bytes, self.waits, self.image_bytes = Counter(), Counter(), [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations[self.phase] += 1
        self.named.setdefault(self.phase, Counter())[func._schema.name] += 1
        if func._schema.name in WAITS:
            self.waits.append(func._schema.name)
        out = func(*args, **kwargs or {})
        given = list(tensors_in((args, kwargs)))
        known = {tensor.untyped_storage()._cdata for tensor in given}
        # In case that memory was given out again, which makes an old storage look new and never a new one look old:
        # what goes in is alive, so nothing that comes out newly made can share its address.
        for tensor in tensors_in(out):
            if (storage := tensor.untyped_storage())._cdata not in known:
                known.add(storage._cdata)
                self.tensors[self.phase] += 1
                self.bytes[self.phase] += storage.nbytes()
                if any(one.dtype == torch.uint8 for one in given) and tensor.dtype != torch.bool:
                    self.image_bytes.append(storage.nbytes())
        return out

    @contextmanager
    def during(self, phase):
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def wrap(self, owner, name, phase):
        inner = getattr(owner, name)

        def outer(*args, **kwargs):
            with self.during(phase):
                return inner(*args, **kwargs)

        setattr(owner, name, outer)

    def watch_reads(self, monkeypatch):
        """Also count what reads a tensor without an operation."""
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self._noted(name, getattr(torch.Tensor, name)))

    def _noted(self, name, inner):
        def outer(tensor, *args, **kwargs):
            if tensor.dtype != torch.float64:  # coefficients of a sampler, which are worked out on the host
                self.waits.append(name)
            return inner(tensor, *args, **kwargs)

        return outer


def tensors_in(value):
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
