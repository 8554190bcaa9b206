"""Parts of the GPU benchmark on fake CUDA, in a process of their own: `python visit.py NAME ...` prints their rows.

Whatever is compared differs, as nothing is computed: what counts is that each row comes, and that none is an error.
"""

import queue
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cases  # isort: skip - it loads the device, and torch after it
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import DeviceType
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers its backend

from unfog.config import validate
from unfog.data.stream import ImageStream
from unfog.diffusion import noise
from unfog.pipeline import compile_network
from unfog.process import device as devices

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks/gpu"))
import networks
import part_exact
import part_profile
import part_ranks
import part_smoke
import part_steps
import part_values
import parts
import steps

import values

with suppress(ImportError):  # before names of torch that it takes for types are replaced
    from diffusers import DDPMScheduler, DiTTransformer2DModel, UNet2DModel  # noqa: F401
    from diffusers.optimization import get_scheduler  # noqa: F401
    from diffusers.training_utils import EMAModel  # noqa: F401

H100 = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=80 * 2**30, uuid="GPU-1")
ANSWERS = {
    "get_arch_list": ["sm_90"],
    "get_device_properties": H100,
    "get_device_capability": (9, 0),
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "max_memory_allocated": 2**30,
    "max_memory_reserved": 2**31,
    **dict.fromkeys(("set_rng_state", "empty_cache", "reset_peak_memory_stats", "set_sync_debug_mode")),
}
SECONDS = 600.0


class VisitedFakeCuda(cases.FakeCuda):
    """Context in which torch has one GPU, to which whole programs may move networks and batches."""

    def __enter__(self):
        super().__enter__()
        self._answer()
        self._leave_out()
        return self

    def _answer(self):
        """Let torch answer what a whole program asks, and move what it moves."""
        for name, answer in ANSWERS.items():
            self.set(torch.cuda, name, lambda *a, _answer=answer, **k: _answer)
        for owner in (devices, validate):
            self.set(owner, "check_device", lambda name: None)
        self.set(torch, "equal", lambda one, other: one.shape == other.shape)
        self.set(nn.Module, "_apply", _apply)
        # A copy of a network would copy the mode with it, whose references to storages would be freed twice.
        self.set(FakeTensorMode, "__deepcopy__", lambda mode, known: mode)
        self.set(ImageStream, "batch", _batch_of(self.mode, ImageStream.batch))
        for owner, name in cases.HOST_ARITHMETIC:
            self.set(owner, name, cases._for_real(getattr(owner, name)))
        self.set(noise.NoiseSource, "draw", cases._fake_noise(self.mode))

    def _leave_out(self):
        """Leave out what no fake device has: files of tensors without values, kernels to profile, a compiler, ranks.

        The capture of a bare step is not on the stream of the loop, which the fake graph asks for.
        """
        self.set(part_exact, "resumed", lambda setting: iter(()))
        self.set(part_values, "_checkpoints", lambda *a: iter(()))
        self.set(part_profile, "profile", lambda activities: _Profile())
        self.set(part_ranks, "init_device_mesh", cases._for_real(part_ranks.init_device_mesh))
        self.set(part_steps, "_SECONDS", 0.01)
        self.set(part_smoke, "_STEPS", 5)  # the fourth is captured
        self.set(part_exact, "_STEPS", 2)
        # Tiny networks, as in the rehearsal on a CPU: what is called, and where tensors are, is the same.
        tiny = {name: changes | {"training": {"batch": 4}} for name, changes in networks._TINY.items()}
        self.set(networks, "_FULL", tiny)
        small = values.cases
        self.set(values, "cases", lambda cpu: small(True))
        self.set(steps, "_captured", lambda step: step)
        self.set(compile_network, "check_can_compile", lambda device: None)
        networks.disable_compiler()


def _apply(module, function, recurse=True):
    """Replace each tensor of a module: torch would swap it with its copy, which it refuses while a mode knows both."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                made = function(parameter.detach())
                each._parameters[name] = nn.Parameter(made, parameter.requires_grad)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = function(buffer)
    return module


class _Profile:
    """A profile with one kernel."""

    def start(self):
        """Profile nothing."""

    stop = start

    def events(self):
        span = SimpleNamespace(start=0.0, end=1.0)
        return [SimpleNamespace(name="nvjet_gemm", device_type=DeviceType.CUDA, time_range=span)]


def _batch_of(mode, real):
    def batch(stream, first, size):
        made = real(stream, first, size)
        pixels, conditions = mode.from_tensor(made.pixels), made.conditions.apply(mode.from_tensor)
        return type(made)(made.first, pixels, conditions, made.index)

    return batch


def _ranks(folder):
    """Return the rows of one of two ranks, whose collectives do nothing; in this process, which has the device."""
    found = queue.Queue()
    part_ranks.rank(0, 2, False, "fake", folder / "meeting", found)
    return list(found.queue)


def _error(part, name, error):
    """Return the row of an error, marked as one: a row whose values differ has failed too, and counts as right here."""
    return replace(parts.attempt(part, name, error), figures={"error": True})


def main(names):
    """Print a line of JSON for each row of some parts."""
    warnings.simplefilter("ignore")
    torch.autograd.set_multithreading_enabled(False)
    for name in names:
        part = parts.PARTS[name]
        with VisitedFakeCuda() as fake, fake.mode, tempfile.TemporaryDirectory() as folder:
            module = __import__(part.module)
            module.attempt = _error
            setting = parts.Setting(False, Path(folder), SECONDS)
            words = [part.argument] if part.argument else []
            for row in _ranks(setting.folder) if name == "ranks" else module.measure(setting, *words):
                print(row.to_json(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
