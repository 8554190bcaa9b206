"""What a compiled training step launches on a GPU, counted without one: `python compiled.py NAME ...` prints JSON.

Needs a CUDA build of torch, and no driver. The real loop compiles the network as `--compile` does: Dynamo, AOTAutograd,
Inductor, and with `binaries` (the DiT) Triton and ptxas for sm_90. The code that comes out then runs on the fake device
of `fakes.py`: what it calls of torch is counted as in any other step, with the layouts that it really gets, and each
kernel of Triton where it would be launched.
"""

# ruff: noqa: E402  torch reads the environment while it is imported
import os
import re
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

# A new folder, so that all is compiled; and no worker processes, which would know nothing of the device.
_code = tempfile.TemporaryDirectory()
os.environ |= {
    "TORCHINDUCTOR_CACHE_DIR": _code.name,
    "TRITON_CACHE_DIR": _code.name,
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}

import cases  # isort: skip - it loads the device, and torch after it
import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.fx_passes import joint_graph, pad_mm
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

import fakes

# What Inductor and Triton ask of a device: NVIDIA's figures of an H100 SXM.
H100 = SimpleNamespace(
    name="NVIDIA H100",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    warp_size=32,
    gcnArchName="",
    multi_processor_count=132,
    total_memory=80 * 2**30,
    L2_cache_size=50 * 2**20,
    clock_rate=1980000,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
)
ANSWERS = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_properties": H100,
    "get_device_capability": (9, 0),
    "get_compute_capability": 90,
    "get_raw_stream": 0,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "should_pad": False,  # a product of matrices: Inductor makes tensors on the GPU to decide, so padding is left out
    **dict.fromkeys(("synchronize", "set_device", "set_rng_state")),
    **dict.fromkeys(("exchange_device", "maybe_exchange_device", "_exchange_device", "_maybe_exchange_device"), 0),
}


# What adds numbers in a kernel of Triton, in an order that its configuration decides.
SUMS = re.compile(
    r"\btl\.(sum|dot|cumsum|reduce|associative_scan|atomic_add)\b|welford|online_softmax|triton_helpers\.any"
)


class _Driver(CudaDriver):
    """Triton's driver, without NVIDIA's library that it would open."""

    launcher_cls = None
    utils = SimpleNamespace(
        get_device_properties=lambda device: {
            "max_shared_mem": H100.shared_memory_per_block_optin,
            "multiprocessor_count": H100.multi_processor_count,
            "warpSize": H100.warp_size,
            "max_num_regs": H100.regs_per_multiprocessor,
        }
    )

    def __init__(self):
        """Open nothing."""

    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        return GPUTarget("cuda", 90, H100.warp_size)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_device_capability(self, device=0):
        return H100.major, H100.minor


class CompilingFakeCuda(fakes.FakeCuda):
    """Context in which torch has one GPU, which networks can be compiled for."""

    binaries = False
    """Whether Triton and ptxas make code for sm_90; it takes twice as long."""

    def __init__(self):
        super().__init__(H100.name)
        self.watch = _Watch()

    def __enter__(self):
        super().__enter__()
        triton.runtime.driver.set_active(_Driver())
        for owner in (torch.cuda, CudaInterface, CudaInterface.Worker, pad_mm):
            for name, value in ANSWERS.items():
                if hasattr(owner, name):
                    self._answer(owner, name, value)
        self._answer(torch._C, "_cuda_getCurrentRawStream", 0)
        guards = torch._C._dynamo.guards  # what compiled code takes tensors from: not from torch, but from the device
        self.set(guards, "_empty_strided_cuda", _empty)
        self.set(guards, "_reinterpret_tensor", _reinterpret)
        self._answer(guards, "assert_alignment", None)  # of addresses, which fake tensors do not have
        folder = joint_graph.UniformValueConstantFolder
        self.set(folder, "_deduce_value", _on_cpu(folder._deduce_value))
        self.set(CachingAutotuner, "precompile", lambda kernel, *a, **k: self._compile(kernel))
        self.set(CachingAutotuner, "run", lambda kernel, *a, **k: self.watch.launched(kernel))
        torch._dynamo.reset()
        counters.clear()
        return self

    def _answer(self, owner, name, value):
        self.set(owner, name, lambda *a, **k: value)

    def _compile(self, kernel):
        """Make the first of the variants of a kernel, among which a GPU would choose by their time."""
        if len(kernel.configs) > 1 and SUMS.search(kernel.fn.src):
            self.watch.tuned.add(kernel.fn.__name__)
        if self.binaries:
            kernel._precompile_config(kernel.configs[0])
            assert any(Path(_code.name).rglob(f"{kernel.fn.__name__}.cubin")), "no machine code was made"


class _Watch(fakes.Watch):
    """Counts what compiled code launches, and not what it is compiled from."""

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __init__(self):
        super().__init__()
        self.tuned = set()
        """Kernels with a sum, among whose configurations a GPU would choose by their time."""

    def clear(self):
        super().clear()
        self.kernels = Counter()

    def launched(self, kernel):
        self.operations += 1
        self.kernels[kernel.fn.__name__] += 1


class _OnCpu(TorchDispatchMode):
    """Makes tensors on the CPU that were to be on the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _on_cpu(function):
    """Let a function of Inductor's compute constants, each of a single value, without the device."""

    def call(*args):
        with _OnCpu():
            return function(*args)

    return call


def _empty(size, stride, dtype):
    return torch.empty_strided(size, stride, dtype=dtype, device=fakes.DEVICE)


def _reinterpret(tensor, size, stride, offset=0):
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def compiled_step_of(config, binaries=False, **options):
    """Return what a compiled step does, as `cases.step_of`. Launches of Triton's kernels are in `kernels` by name."""
    CompilingFakeCuda.binaries = binaries
    cases.FakeCuda = CompilingFakeCuda
    return cases.step_of(cases.update(config, {"training": {"compile": True}}, ""), **options)


def figures(watch):
    """Return the figures that the budget holds."""
    flat = sum(count for layout, count in watch.layouts.items() if "NCHW" in layout)
    return {
        "launches": watch.operations,
        "kernels of Triton": sum(watch.kernels.values()),
        "convolutions": sum(watch.layouts.values()),
        "convolutions in NCHW": flat,
        "attention": sum(watch.attention.values()),
        "attention by the math kernel": watch.attention["math"],
        "sums by time": len(watch.tuned),
        "waits": sum(watch.waits.values()),
        "graphs": counters["stats"]["unique_graphs"],
        "graph breaks": sum(counters["graph_break"].values()),
    }


def _without_layouts(state):
    inductor.force_layout_optimization = False
    # The format of the 16-bit weights would choose that of the convolutions, as those of the state would.
    state.model.channels_last = False


def _by_time(state):
    inductor.deterministic, inductor.max_autotune_pointwise = False, True
    torch.use_deterministic_algorithms(False)


def _with_a_break(state):
    block = state.model.blocks[0]
    forward = block.forward

    def broken(*args):
        torch._dynamo.graph_break()
        return forward(*args)

    block.forward = broken


DROPOUT = "unet:channels=32/32,attention=false/true,blocks=1,dropout=0.1"
CASES = {
    "unet": lambda: compiled_step_of(cases.config_of(**cases.ADAMW)),
    "mpunet": lambda: compiled_step_of(cases.config_of(cases.MP, **cases.ADAMW)),
    "dit": lambda: compiled_step_of(cases.config_of(cases.DIT, **cases.ADAMW), binaries=True),
    "dropout": lambda: compiled_step_of(cases.config_of(DROPOUT, **cases.ADAMW)),
    "planted time": lambda: compiled_step_of(cases.config_of(**cases.ADAMW), mutate=_by_time),
    "planted layout": lambda: compiled_step_of(cases.config_of(**cases.ADAMW), mutate=_without_layouts, converted=True),
    "planted break": lambda: compiled_step_of(cases.config_of(cases.DIT, **cases.ADAMW), mutate=_with_a_break),
}


if __name__ == "__main__":
    cases.main(CASES, figures)
