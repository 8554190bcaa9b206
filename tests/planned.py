"""What the tests of predicted memory share, also with the processes that they start: so without pytest."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from unfog.config.presets import preset
from unfog.config.schema import Config
from unfog.data.augmentation import Augment
from unfog.data.dataset import ImageSet
from unfog.data.stream import ImageStream
from unfog.models.settings import DiT, UNet
from unfog.pipeline.build import build_loss, build_state
from unfog.planning.memory_estimate import MemoryEstimator
from unfog.planning.memory_recorder import Trace
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import LoopSettings, train

TINY = DiT(width=8, depth=1, head_channels=8, patch=1, modulation="block")
"""Has the fewest operations, each of which costs a trace a third of a millisecond."""
SMALL = UNet((8,), attention=(False,), mid_attention=True, norm_groups=4, head_channels=8, dropout=0.1)
"""With blocks enough that computing them anew saves memory, and normalisation that autocast treats in two ways."""


def config(batch=8, size=16, network=TINY, recipe="default", **training) -> Config:
    """The settings of a preset, as defaults of `Config` that all presets replace are those of no run."""
    given, training = preset(recipe), {"precision": "fp32", **training}
    data, training = replace(given.data, size=size, channels=3), replace(given.training, batch=batch, **training)
    return replace(given, network=network, data=data, training=training)


def traced(config, device, microbatch, passes=1, checkpointing=False, processes=1) -> Trace:
    """A trace from the cache that tests share, or a new one."""
    return MemoryEstimator(config, device, processes)._traced(microbatch, passes, checkpointing)


def live(trace: Trace) -> int:
    """The most bytes at once, without what an allocator adds."""
    now = most = 0
    for event in trace.events:
        now += trace.sizes[event] if event >= 0 else -trace.sizes[~event]
        most = max(most, now)
    return most


def train_on_black(config, images) -> None:
    """Train in this process on so many black images."""
    state = build_state(config, torch.device("cpu"))
    train(LoopSettings(config.training, config.optimizer), state, black_images(config), TrainingHooks())
    assert state.seen == images == config.training.images


def black_images(config) -> Task:
    pixels = np.zeros((8, 3, config.data.size, config.data.size), np.uint8)
    images = ImageSet(pixels, tuple("abcdefgh"))
    return Task(ImageStream(images, 0), Augment(), build_loss(config))


@contextmanager
def counted_memory() -> Iterator[list[int]]:
    """Count the most bytes by which resident memory grows inside, with memory of its own for each tensor.

    That leaves the allocator's holes aside, and what it kept of earlier work is given back first.
    """
    libc, found = ctypes.CDLL(None), []
    libc.mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    gc.collect()
    libc.malloc_trim(0)
    before = _status("VmRSS")
    forget_peak()
    yield found
    found.append(_status("VmHWM") - before)


def forget_peak() -> None:
    """Begin anew with what there is now, so that what is made only once does not count."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(key) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
