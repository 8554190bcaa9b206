"""Fake CUDA: torch believes in a GPU whose tensors have shapes, strides and no values. Import before torch.

What an operation does on the host is real: which device each tensor is on, what is copied and how, what waits for the
device, and which kernels of attention a layout allows. `Watch` counts all of it. Nothing is computed.
"""

import ctypes
import os
import sys
import traceback
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

assert "torch" not in sys.modules, "torch looks up the hooks of a device once, so they must be loaded before it"
_device = ctypes.CDLL(os.environ["FAKE_CUDA"], mode=ctypes.RTLD_GLOBAL)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch._prims_common import suggest_memory_format  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils import _foreach_utils  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from unfog.models import group_norm  # noqa: E402

_device.take_over()
if torch.version.cuda is None:
    # Without a kernel of CUDA, torch would take it for a composition of seven operations.
    _kernels = torch.library.Library("aten", "IMPL")
    _kernels.impl("silu_backward", lambda gradient, x: gradient, "CUDA")

DEVICE = torch.device("cuda", 0)
ATTENTION = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
    "_safe_softmax": "math",  # of a composition, which torch calls a kernel
}
PACKAGE = f"{os.sep}unfog{os.sep}"
READS = ("item", "__float__", "__int__", "__bool__", "__index__")
FREE = (  # of launches
    *("detach", "alias", "lift_fresh", "_unsafe_view"),
    *("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"),
)
# From the page of torch.use_deterministic_algorithms, as of 2.13: what raises an error on CUDA.
RAISES_WHEN_DETERMINISTIC = frozenset(
    (
        *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
        *("max_pool3d_with_indices_backward", "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward"),
        *("fractional_max_pool3d_backward", "max_unpool2d", "max_unpool3d", "upsample_linear1d_backward"),
        *("upsample_bilinear2d_backward", "upsample_bicubic2d_backward", "upsample_trilinear3d_backward"),
        *("reflection_pad1d_backward", "reflection_pad3d_backward", "replication_pad1d_backward"),
        *("replication_pad2d_backward", "replication_pad3d_backward", "nll_loss2d_forward", "_ctc_loss_backward"),
        *("_embedding_bag_backward", "put_", "histc", "bincount", "kthvalue", "median", "grid_sampler_2d_backward"),
        *("grid_sampler_3d_backward", "cumsum", "scatter_reduce", "resize_", "index_copy", "_cumsum"),
    )
) - {"resize_", "index_copy"}


# Fused optimisers that write into what they are given, and that torch does not know on tensors without values.
_without_values = torch.library.Library("aten", "IMPL", "Meta")
for _name in ("_fused_adamw_.tensor_lr", "_fused_sgd_", "_fused_sgd_.tensor_lr"):
    _without_values.impl(_name, lambda *args, **options: None)
_without_values.impl("cudnn_grid_sampler", lambda x, grid: x.new_empty(*x.shape[:2], *grid.shape[1:3]))


def place(limit=2):
    """Return where in the package an operation was called: "training/loop.py:12 < ..."."""
    frames = [frame for frame in traceback.extract_stack() if PACKAGE in frame.filename]
    lines = [f"{frame.filename.rpartition(PACKAGE)[2]}:{frame.lineno}" for frame in reversed(frames[-limit:])]
    return " < ".join(lines) or "outside"


def tensors_in(value):
    """Yield every tensor in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


_updates = Counter()  # by the optimiser, of all that were watched, so that events know what came after them


class Watch(TorchDispatchMode):
    """Counts the operations on the fake device, and notes what a GPU would punish."""

    def __init__(self):
        super().__init__()
        self.clear()

    said = left = None  # of a capture, and by a run

    def clear(self):
        self.operations, self.waits, self.copies, self.faults = 0, Counter(), Counter(), Counter()
        self.attention, self.named, self.layouts = Counter(), Counter(), Counter()
        self.converted_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        out = func(*args, **kwargs)
        made = list(tensors_in(out))
        name = func._schema.name.partition("::")[2]
        kinds = {tensor.device.type for tensor in (*given, *made) if tensor.dim() or tensor.device.type == "cuda"}
        if kwargs.get("pin_memory"):
            self.named["pinned"] += 1
            _pinned[made[0].untyped_storage()._cdata] = made[0]
        if "cuda" not in kinds:
            return out
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != "cuda":
            self.faults[f"{name} on cuda with a generator of the CPU @ {place()}"] += 1
        if name in ("_to_copy", "copy_", "to"):
            bound = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
            source, target = (bound["src"], bound["self"]) if name == "copy_" else (bound["self"], made[0])
            self._copied(source, target, bound.get("non_blocking", False))
        elif "cpu" in kinds:
            self.faults[f"{name} of tensors on cpu and cuda @ {place()}"] += 1
        if name in RAISES_WHEN_DETERMINISTIC and any(t.is_floating_point() for t in given):
            self.faults[f"{name} has no deterministic kernel @ {place()}"] += 1
        if name in ("conv2d", "convolution", "convolution_backward"):
            self._convolved(name, given, made)
        if name in ATTENTION:
            self.attention[ATTENTION[name]] += 1
        if name == "scaled_dot_product_attention":  # as a whole, where no gradients are recorded
            fused = all(tensor.stride(-1) == 1 for tensor in given[:3])
            self.attention["fused" if fused else "math"] += 1
        if func.namespace != "prim" and not func.is_view and name not in FREE:
            self.operations += 1
            self.named[name] += 1
            _updates[name] += name.startswith("_fused_adamw")
        return out

    def _convolved(self, name, given, made):
        """Note the formats of a convolution's input, or of gradient and input; those of the network's ends are free."""
        backward = name == "convolution_backward"
        inputs = given[: 1 + backward]
        if min(inputs[0].shape[1], (inputs[1] if backward else made[0]).shape[1]) > 4:
            self.layouts[f"{name} of {' and '.join(map(_layout, inputs))}"] += 1
        weight = given[1 + backward]
        if _layout(inputs[0]) == "NHWC" and not weight.is_contiguous(memory_format=torch.channels_last):
            # Inside torch's kernel, so that nothing else shows it.
            self.named["weights converted"] += 1
            self.converted_bytes += 2 * weight.numel() * weight.element_size()  # read and written

    def _copied(self, source, target, free):
        if source.device.type == target.device.type:
            return
        on_host = source if source.device.type == "cpu" else target
        way = f"{source.device.type} to {target.device.type}"
        if free and is_pinned(on_host):
            self.copies[f"{way}, pinned @ {place()}"] += 1
        else:
            self.waits[f"copy {way}, {'pageable' if free else 'blocking'} @ {place()}"] += 1


_pinned = {}  # storages of fake tensors have no state of their own for it


def is_pinned(tensor):
    """Return whether a fake tensor was pinned, or made pinned."""
    return tensor.untyped_storage()._cdata in _pinned


def _pin(tensor, *device):
    out = torch.empty(
        tensor.shape, dtype=tensor.dtype
    )  # not a copy, as a fake tensor made of numbers knows them, and would use CUDA itself
    _pinned[out.untyped_storage()._cdata] = out  # kept alive, so that its number is not given out again
    return out


def _layout(tensor):
    """Return the order of the dimensions of [B, C, H, W] in memory, also of some of the channels of a tensor."""
    return "NHWC" if suggest_memory_format(tensor) == torch.channels_last else "NCHW"


def _cudnn_format(image, weight, backend):
    """Return the format that cuDNN computes in: the build for CPUs, which has no cuDNN, would answer NCHW."""
    return max(
        suggest_memory_format(image), suggest_memory_format(weight), key=lambda form: form == torch.channels_last
    )


class _Stream:
    """A queue of work; two are one only if they are the same object."""

    def synchronize(self):
        """A wait that is meant: nothing is counted."""

    def wait_stream(self, other):
        """A wait of the device for itself."""

    wait_event = wait_stream

    def record_event(self):
        event = torch.cuda.Event()
        event.record()
        return event


class _Event:
    """An event behind a step's verdict: waiting for it while the next step is queued leaves the device at work."""

    def __init__(self, fake):
        self.fake, self.recorded = fake, None

    def record(self, stream=None):
        self.recorded = _updates.total()

    def synchronize(self):
        assert self.recorded is not None, "an event that was never recorded"
        late = _updates.total() > self.recorded
        self.fake.watch.named["late read" if late else "read at the end"] += 1


class _GeneratorType(type):
    """Makes generators of the CPU, and a state for one of the GPU; Inductor asks what is an instance."""

    real = torch.Generator

    def __call__(cls, device="cpu"):
        if torch.device(device).type == "cpu":
            return cls.real()
        return SimpleNamespace(graphsafe_get_state=lambda: "a state that no capture has")

    def __instancecheck__(cls, value):
        return isinstance(value, cls.real)


class _Generator(metaclass=_GeneratorType):
    pass


class _Graph:
    """A CUDA graph: `watch` is of what was captured, which a replay does not do anew."""

    def __init__(self, fake):
        self.fake, self.watch = fake, Watch()

    def replay(self):
        assert self.fake.stream is self.stream, "replayed on another stream than that of the capture"
        _updates["replay"] += 1
        self.fake.watch.named["replay"] += 1


class _Capture:
    """`torch.cuda.graph`. A capture that CUDA invalidates leaves behind what torch leaves behind."""

    def __init__(self, fake, graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local", "other threads write checkpoints"
        self.fake, self.graph, self.pool, self.before = fake, graph, pool, fake.watch
        self.stream = graph.stream = stream

    def __enter__(self):
        fake = self.fake
        assert self.stream is fake.stream is not fake.first_stream, "the default stream cannot be captured"
        fake.graph, fake.watch = self.graph, self.graph.watch
        fake.capturing, fake.pools, fake.generator_is_free = True, {*fake.pools, self.pool}, False
        self.graph.watch.__enter__()

    def __exit__(self, *error):
        fake = self.fake
        self.graph.watch.__exit__(*error)
        fake.watch, fake.capturing = self.before, False
        if fake.invalidated:
            fake.invalidated = False
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        fake.pools, fake.generator_is_free = fake.pools - {self.pool}, True


class _OnStream:
    """`torch.cuda.stream`."""

    def __init__(self, fake, stream):
        self.fake, self.stream = fake, stream

    def __enter__(self):
        self.before, self.fake.stream = self.fake.stream, self.stream

    def __exit__(self, *error):
        self.fake.stream = self.before


class FakeCuda(ExitStack):
    """Context in which torch has one GPU. `watch` counts what happens on it; `mode` is the `FakeTensorMode`.

    `graph` is the last CUDA graph that was captured, and `capturing` whether one is being captured; `invalidated` ends
    that with an error of CUDA. `pools` are those from which the allocator believes that a capture takes memory, and
    `generator_is_free` is whether random numbers can be drawn outside a capture.
    """

    graph, capturing, invalidated, pools, generator_is_free = None, False, False, frozenset(), True

    def __init__(self, name="NVIDIA H100", native_bf16=True):
        super().__init__()
        self.watch, self.mode = Watch(), FakeTensorMode(allow_non_fake_inputs=True)
        self._name, self._bf16 = name, native_bf16

    def set(self, owner, name, value):
        """Set an attribute until the context ends."""
        if hasattr(owner, name):
            self.callback(setattr, owner, name, getattr(owner, name))
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def _end_pool(self, device, pool):
        assert pool in self.pools, "no capture takes memory from this pool"
        self.pools -= {pool}

    def _free_generator(self, state):
        self.generator_is_free = True

    latest = None

    def __enter__(self):
        super().__enter__()
        FakeCuda.latest = self
        self.set(FakeTensorMode, "avoid_device_init", property(lambda mode: True))
        self.set(fake_tensor, "init_gpu_context", lambda device: None)  # torch 2.11 would ask the driver
        for name, answer in (
            ("is_available", True),
            ("device_count", 1),
            ("current_device", 0),
            ("get_device_name", self._name),
            ("mem_get_info", (78 * 2**30, 80 * 2**30)),
            ("memory_reserved", 0),
            ("memory_allocated", 0),
            ("max_memory_allocated", 0),
            ("max_memory_reserved", 0),
            ("synchronize", None),
        ):
            self.set(torch.cuda, name, lambda *a, _answer=answer, **k: _answer)
        self.set(torch.cuda, "set_device", torch._utils._get_device_index)  # which refuses a GPU without a number
        self.set(group_norm, "_FUSED", False)  # Triton launches nothing on this device
        self.set(torch.cuda, "is_bf16_supported", lambda including_emulation=True: self._bf16)
        self.set(torch.cuda, "manual_seed_all", lambda seed: None)
        self.stream = self.first_stream = _Stream()
        self.set(torch.cuda, "current_stream", lambda *device: self.stream)
        self.set(torch.cuda, "Stream", lambda *device, priority=0: _Stream())
        self.set(torch.cuda, "stream", lambda stream: _OnStream(self, stream))
        self.set(torch.cuda, "graph_pool_handle", lambda: (0, len(self.pools) + 1))
        self.set(torch.cuda, "Event", lambda: _Event(self))
        self.set(torch.cuda, "CUDAGraph", lambda: _Graph(self))
        self.set(torch.cuda, "graph", lambda graph, **settings: _Capture(self, graph, **settings))
        self.set(torch.cuda, "default_generators", (SimpleNamespace(graphsafe_set_state=self._free_generator),))
        # Of builds for CUDA alone.
        self.set(torch._C, "_cuda_endAllocateToPool", self._end_pool)
        self.set(torch, "Generator", _Generator)
        self.set(torch.Tensor, "pin_memory", _pin)
        self.set(torch.Tensor, "is_pinned", is_pinned)
        self.set(torch._C, "_conv_determine_backend_memory_format", _cudnn_format)
        self.set(_foreach_utils, "_has_foreach_support", lambda tensors, device: True)
        self.set(torch.nn.utils.clip_grad, "_has_foreach_support", lambda tensors, device: True)
        for name in READS:
            self._watch_read(name, {"__bool__": True, "__int__": 1, "__index__": 1}.get(name, 1.0))
        self._watch_bulk_reads()
        return self

    def _watch_read(self, name, answer):
        real = getattr(torch.Tensor, name)

        def read(tensor, *args):
            if not isinstance(tensor, FakeTensor):
                return real(tensor, *args)
            if tensor.device.type == "cuda":
                self.watch.waits[f"{name} @ {place()}"] += 1
            return answer

        self.set(torch.Tensor, name, read)

    def _watch_bulk_reads(self):
        real = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy")}

        def tolist(tensor):
            if not isinstance(tensor, FakeTensor):
                return real["tolist"](tensor)
            if tensor.device.type == "cuda":
                self.watch.waits[f"tolist @ {place()}"] += 1
            return np.ones(tuple(tensor.shape)).tolist()

        def numpy(tensor, **options):
            if not isinstance(tensor, FakeTensor):
                return real["numpy"](tensor, **options)
            assert tensor.device.type == "cpu", "numpy() of a tensor on cuda"
            return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

        self.set(FakeTensor, "tolist", tolist)  # which has one of its own
        self.set(torch.Tensor, "numpy", numpy)
