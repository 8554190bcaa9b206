"""Cases of cases.py on a fake MPS device, in fp32: `python mps_cases.py NAME ...` prints a JSON object by name.

MPS has no float64, which the CPU and CUDA would hide; and tensors and generators must be on one device there too.
"""

from collections import Counter

import fakes  # isort: skip - it must come before torch

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("mps", 0)
COPIES = ("_to_copy", "copy_", "to")


class Watch(TorchDispatchMode):
    """Notes what MPS would refuse."""

    def __init__(self):
        super().__init__()
        self.clear()

    def clear(self):
        self.operations, self.faults, self.attention = 0, Counter(), Counter()
        self.waits, self.copies, self.named = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [*fakes.tensors_in((args, kwargs)), *fakes.tensors_in(out)]
        there = [tensor for tensor in tensors if tensor.device.type == "mps"]
        if not there:
            return out
        name, generator = func._schema.name.partition("::")[2], kwargs.get("generator")
        if any(tensor.dtype in (torch.float64, torch.complex128) for tensor in there):
            self.faults[f"{name} of float64 @ {fakes.place()}"] += 1
        if name not in COPIES and any(tensor.dim() and tensor.device.type == "cpu" for tensor in tensors):
            self.faults[f"{name} of tensors on cpu and mps @ {fakes.place()}"] += 1
        if generator is not None and generator.device.type != "mps":
            self.faults[f"{name} on mps with a generator of the CPU @ {fakes.place()}"] += 1
        self.operations += 1
        return out


class FakeMps(fakes.FakeCuda):
    """Context in which torch has MPS, and no CUDA."""

    def __enter__(self):
        super().__enter__()
        self.set(torch.cuda, "is_available", lambda: False)
        moved, attend = torch.nn.Module.to, F.scaled_dot_product_attention

        def to(module, *args, **kwargs):
            there = all(parameter.device == DEVICE for parameter in module.parameters())
            return module if there else moved(module, *args, **kwargs)

        def products(q, k, v, **options):
            if q.device.type != "mps":
                return attend(q, k, v, **options)
            # The fake kernel is none that MPS has: torch asks the device for one before tensors are looked at.
            return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v

        self.set(torch.nn.Module, "to", to)
        self.set(F, "scaled_dot_product_attention", products)
        return self


fakes.DEVICE, fakes.Watch, fakes.FakeCuda = DEVICE, Watch, FakeMps
import cases  # noqa: E402  it takes these names from `fakes`

_config_of = cases.config_of
_CASES = cases.CASES | {
    "planted float64": lambda: cases.step_of(cases.config_of(cases.SMALL), plant=lambda loss, x0: x0.double() + 1)
}


def _in_fp32(network="unet:channels=32/32,attention=false/true,blocks=1", precision="", **changes):
    """Settings in the one precision that runs have on MPS, whatever the case says."""
    return _config_of(network, "fp32", **changes)


cases.config_of = _in_fp32


def _figures(watch):
    return {"faults": dict(watch.faults), "operations": watch.operations}


if __name__ == "__main__":
    cases.main(_CASES, _figures)
