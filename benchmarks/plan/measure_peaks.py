"""Predicted against measured peak memory of training on a CPU.

Each configuration trains for a few steps in a process of its own. Measured is the growth of the resident memory, from
just before the network is built to its highest point, as Linux counts it; predicted is what `unfog plan` would say.
Of several processes, the one that takes the most counts.

    OMP_NUM_THREADS=1 python benchmarks/plan/measure_peaks.py [--repeats 3] [--only TEXT] [--table]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a process that is measured imports Unfog where it needs it
    from unfog.training.settings import PrecisionName

STEPS = 3


@dataclass(frozen=True)
class Case:
    """One configuration."""

    network: str
    size: int
    batch: int
    microbatch: int = 0
    precision: PrecisionName = "fp32"
    checkpointing: bool = False
    processes: int = 1
    shard: bool = False
    fitted: bool = False
    """Whether the constants of the prediction were chosen while looking at it; the others are the check."""

    def __str__(self) -> str:
        micro = f"/{self.microbatch}" if self.microbatch else ""
        extra = " checkpointing" if self.checkpointing else ""
        several = f", {self.processes} processes{' divided' if self.shard else ''}" if self.processes > 1 else ""
        return f"{self.network} {self.size} px, batch {self.batch}{micro}, {self.precision}{extra}{several}"


CASES = [
    Case("tiny", 32, 64, fitted=True),
    Case("tiny", 32, 64, precision="bf16", fitted=True),
    Case("small", 32, 32, fitted=True),
    Case("small", 64, 16, precision="bf16", fitted=True),
    Case("tiny", 32, 256, 64),
    Case("tiny", 64, 16),
    Case("tiny", 64, 32, precision="bf16"),
    Case("tiny", 28, 128),
    Case("small", 32, 64, 16),
    Case("small", 32, 64, precision="bf16"),
    Case("small", 64, 32),
    Case("small", 128, 4),
    Case("small", 128, 8, 2, precision="bf16"),
    Case("cifar10", 32, 8),
    Case("cifar10", 32, 16, 4, precision="bf16"),
    Case("base", 64, 4),
    Case("base", 64, 8, precision="bf16"),
    Case("base", 64, 8, 2),
    Case("mp-tiny", 32, 64),
    Case("mp-tiny", 32, 64, precision="bf16"),
    Case("mp-tiny", 32, 64, 16),
    Case("dit-tiny", 32, 64),
    Case("dit-tiny", 32, 64, precision="bf16"),
    Case("dit-tiny", 64, 16, 8),
    Case("tiny", 32, 64, checkpointing=True, fitted=True),
    Case("small", 64, 16, checkpointing=True),
    Case("base", 64, 8, checkpointing=True),
    *(
        Case(network, size, batch, microbatch, processes=2, shard=shard)
        for network, size, batch, microbatch in (("small", 32, 16, 0), ("dit-tiny", 32, 32, 0), ("base", 32, 4, 1))
        for shard in (False, True)
    ),
]


def config_of(case: Case):
    """The configuration that a case is short for."""
    from unfog.config.schema import Config
    from unfog.data.settings import Data
    from unfog.models.settings import SIZES
    from unfog.training.settings import Optimizer, Training

    training = Training(
        batch=case.batch,
        microbatch=case.microbatch,
        precision=case.precision,
        device="cpu",
        shard=case.shard,
        images=case.batch * 1000,
    )
    if case.checkpointing:
        training = replace(training, checkpointing=True)
    data = Data(size=case.size, channels=3)
    return Config(network=SIZES[case.network], data=data, training=training, optimizer=Optimizer(lr=1e-4))


def status(key: str) -> int:
    """Bytes that Linux says of this process under a key of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def measure(case: Case) -> int:
    """Growth of this process, in bytes, while it trains."""
    import gc

    from unfog.config.schema import Config
    from unfog.data.augmentation import Augment
    from unfog.data.dataset import ImageSet
    from unfog.data.stream import ImageStream
    from unfog.diffusion.objective import Objective
    from unfog.models.settings import UNet
    from unfog.pipeline.build import build_state
    from unfog.training.distributed.world import init_world
    from unfog.training.hooks import Task, TrainingHooks
    from unfog.training.loop import Intervals, LoopSettings, train

    import numpy as np
    import torch

    device = torch.device("cpu")

    class Few(TrainingHooks):
        """So many steps, and no end of a run, at which the first process has a divided network whole."""

        def __init__(self, state, images):
            self.state, self.images = state, images

        def stop_requested(self) -> bool:
            return self.state.seen >= self.images

    def run(config: Config, world) -> None:
        shape = (64, *config.input_shape)
        pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        images = ImageSet(pixels, tuple(map(str, range(64))))
        state = build_state(config, device, home=world.init_device(case.shard, device))
        if case.shard:
            world.shard_state(state)
            forget_peak()
        every = Intervals(log=0, preview=0, evaluate=0, checkpoint=0)
        augment, objective = Augment(), Objective(config.diffusion)
        few, stream = Few(state, STEPS * config.training.batch), ImageStream(images, 0)
        train(
            LoopSettings(config.training, config.optimizer, every), state, Task(stream, augment, objective), few, world
        )
        world.shards = None

    small = UNet(channels=(8, 16), attention=(False, True), norm_groups=4, head_channels=8)
    warm = config_of(replace(case, batch=4, size=16, microbatch=0))
    with init_world() as world:
        world.init_process_group(device, 600.0)
        run(replace(warm, network=small), world)  # what is loaded and compiled at the first use, in every process
        gc.collect()
        before = status("VmRSS")
        forget_peak()
        run(config_of(case), world)
        return status("VmHWM") - before


def forget_peak() -> None:
    """Have Linux forget the highest point so far."""
    Path("/proc/self/clear_refs").write_text("5")


def table() -> None:
    """What a 35M network takes on a GPU at 64x64 and at 256x256, batch 64, by part.

    The rule of thumb is: parameters 140 MB, gradients 140, Adam 280, activations 2 to 4 GB, and 16 times that at 256.
    """
    from unfog.planning.memory_estimate import MemoryEstimator

    for size in (64, 256):
        precision: PrecisionName
        for precision in ("fp32", "bf16"):
            for checkpointing in (False, True):
                case = Case("base", size, 64, precision=precision, checkpointing=checkpointing)
                peak = MemoryEstimator(config_of(case), "cuda").step(64, checkpointing)
                parts = ", ".join(f"{name} {count / 1e6:,.0f}" for name, count in peak.parts.items() if count > 1e5)
                print(f"{case!s:44} {peak.total / 1e6:9,.0f} MB: {parts}", flush=True)


def main() -> None:
    """Print a line for each configuration and the spread of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--child", default="")
    parser.add_argument("--table", action="store_true", help="print the usual table for 35M parameters, corrected")
    options = parser.parse_args()
    if options.table:
        table()
        return
    if options.child:
        print(measure(Case(**json.loads(options.child))))
        return
    from unfog.planning.memory_estimate import MemoryEstimator

    print(f"{'configuration':44} {'predicted':>10} {'measured':>10} {'ratio':>6} {'spread':>7} {'took':>6}")
    for case in CASES:
        if options.only not in str(case):
            continue
        started = time.perf_counter()
        config, share = config_of(case), case.batch // case.processes
        config = replace(config, training=replace(config.training, batch=share))
        traces = MemoryEstimator(config, "cpu", case.processes)
        predicted = traces.step(case.microbatch or share, case.checkpointing).total
        took = time.perf_counter() - started
        found = []
        for _ in range(options.repeats):
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.processes)]
            command = [sys.executable, *(launch if case.processes > 1 else ()), __file__, "--child"]
            done = subprocess.run([*command, json.dumps(asdict(case))], check=True, capture_output=True, text=True)
            found.append(max(map(int, done.stdout.split())))
        mean = sum(found) / len(found)
        spread = (max(found) - min(found)) / mean
        mark = " (fitted)" if case.fitted else ""
        print(
            f"{case!s:44} {predicted / 1e6:7,.0f} MB {mean / 1e6:7,.0f} MB {predicted / mean:6.2f} {spread:6.1%}"
            f" {took:4.1f} s{mark}",
            flush=True,
        )


if __name__ == "__main__":
    main()
