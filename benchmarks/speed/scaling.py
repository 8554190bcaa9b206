"""How long a step takes on many devices: a model, its table for clusters, and a check of it against real processes.

    python benchmarks/speed/scaling.py                                             the table of docs/scaling.md
    python benchmarks/speed/scaling.py --check --ranks 2 4 --megabits 50 200 1000  against gloo (Linux, root)

The table is arithmetic throughout: operations are counted, rates of devices and links are assumed. The check trains for
real, on this machine's cores, with each process in a network namespace of its own and its link throttled.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

from unfog.data.augmentation import Augment
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.objective import Objective
from unfog.models.network_settings import build_model
from unfog.models.settings import SIZES, Architecture, DiT
from unfog.planning.flops import _LAUNCH, NetworkCost
from unfog.training.distributed.world import SINGLE_PROCESS, World, init_world
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import Intervals, LoopSettings, train
from unfog.training.precision import Precision
from unfog.training.settings import Muon, Optimizer, PowerEma, Training
from unfog.training.state import TrainState

import torch
import torch.distributed as dist
from nodes import LINK, Nodes

BUCKET = 25 * 2**20  # bytes of gradients that DistributedDataParallel sends at once; the first bucket has a 25th of it


@dataclass(frozen=True)
class Work:
    """What one device has to do in a step."""

    parameters: int
    batch: int
    """Images on each device."""
    numbers: int
    """Of one image."""
    forward: float
    """Seconds, as the next two."""
    backward: float
    update: float
    drawing: float = 0.0
    """Seconds to draw the noise of one image."""
    units: int = 16
    """Parts that FSDP gathers one at a time."""


@dataclass(frozen=True)
class Link:
    """What is between devices: bytes a second, within a node and out of one node; seconds of a message."""

    inside: float
    outside: float
    latency: float
    node: int = 8
    """Devices in a node."""

    def seconds(self, sent: float, ranks: int) -> float:
        """For what each rank of a ring sends; the ring leaves each node once."""
        return sent / (self.outside if ranks > self.node else self.inside)

    def message(self, ranks: int) -> float:
        """For a small sum over all, by a tree."""
        return 2 * math.ceil(math.log2(ranks)) * self.latency if ranks > 1 else 0.0


def sent_ddp(parameters: int, ranks: int, bytes_each: int = 4) -> float:
    """Bytes that each rank sends in a step: a ring scatters the sum, and gathers it."""
    return 2 * (ranks - 1) / ranks * parameters * bytes_each


def overlapped(compute: float, exchange: float, parts: int) -> float:
    """Seconds of work in so many equal parts, each of which is exchanged while the next is computed."""
    return max(compute + exchange / parts, compute / parts + exchange)


def ddp(work: Work, link: Link, ranks: int, bytes_each: int = 4) -> float:
    """Seconds of a step with DistributedDataParallel."""
    exchange = link.seconds(sent_ddp(work.parameters, ranks, bytes_each), ranks)
    buckets = 1 + math.ceil(max(0, work.parameters * 4 - BUCKET / 25) / BUCKET)
    return work.forward + overlapped(work.backward, exchange, buckets) + common(work, link, ranks)


def fsdp(work: Work, link: Link, ranks: int) -> float:
    """Seconds of a step with FSDP2: bf16 weights gathered before forward and backward, fp32 gradients scattered."""
    gather = link.seconds((ranks - 1) / ranks * work.parameters * 2, ranks)
    scatter = link.seconds((ranks - 1) / ranks * work.parameters * 4, ranks)
    passes = overlapped(work.forward, gather, work.units) + overlapped(work.backward, gather + scatter, work.units)
    return passes + common(replace(work, update=work.update / ranks), link, ranks)


def common(work: Work, link: Link, ranks: int) -> float:
    """Seconds of the update, of the noise, which each draws for all, and of the message in which all agree."""
    return work.update + work.drawing * work.batch * ranks + link.message(ranks)


# The table.

H100 = 990e12  # floating-point operations a second in bf16, dense
_UTILISATION = 0.3
MEMORY = 3.3e12  # bytes a second
DRAWN = 1e11  # normal numbers a second
LINKS = {
    "400 Gbit/s a GPU": Link(300e9, 8 * 50e9, 10e-6),
    "400 Gbit/s a node": Link(300e9, 50e9, 10e-6),
    "100 Gbit/s a node": Link(300e9, 12.5e9, 20e-6),
}
LARGE = DiT(patch=2, width=1536, depth=28)


def on_h100(network: Architecture, shape: tuple[int, int, int], batch: int) -> Work:
    """What a step takes there, by operations counted and rates assumed."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build_model(network, shape[0]).parameters())
    cost, rate = NetworkCost.of(lambda: build_model(network, shape[0]), shape), H100 * _UTILISATION
    both = max(batch * cost.training / rate, cost.operations * _LAUNCH)
    forward = both * cost.forward / cost.training
    update = 40 * parameters / MEMORY  # weights, gradient, two moments and two averages are read, and most written
    numbers = math.prod(shape)
    return Work(parameters, batch, numbers, forward, both - forward, update, numbers / DRAWN)


def table() -> None:
    """Efficiency on 8, 64 and 512 devices, as Markdown."""
    networks = {
        "`base`, 64x64, 32 images": (SIZES["base"], (3, 64, 64), 32),
        "DiT, 32x32x4, 16": (LARGE, (4, 32, 32), 16),
    }
    print("| network, images a GPU | links | way | 8 GPUs | 64 | 512 |\n|---|---|---|---|---|---|")
    for name, arguments in networks.items():
        work = on_h100(*arguments)
        alone = work.forward + work.backward + work.update + work.drawing * work.batch
        name = f"{name}: {work.parameters / 1e6:.0f}M, {alone * 1e3:.0f} ms alone"
        for words, link in LINKS.items():
            for way, step in (("DDP", ddp), ("DDP, bf16", partial(ddp, bytes_each=2)), ("FSDP2", fsdp)):
                found = [step(work, link, ranks) for ranks in (8, 64, 512)]
                cells = " | ".join(f"{1e3 * s:.0f} ms, {alone / s:.0%}" for s in found)
                print(f"| {name} | {words} | {way} | {cells} |")
                name = ""


# The check.

NETWORK = SIZES["tiny"]
SHAPE, BATCH, STEPS = (1, 16, 16), 8, 7


class Images:
    """A stream of random images that are there already."""

    def batch(self, first: int, size: int):
        """Black ones."""
        pixels = torch.zeros(size, *SHAPE, dtype=torch.uint8)
        return type("Batch", (), {"pixels": pixels, "label": None})


class Watch(TrainingHooks):
    """Notes the time, and the bytes sent, after each step."""

    def __init__(self) -> None:
        self.marks = [(time.perf_counter(), sent())]

    def on_step_end(self, step: int) -> None:
        """Note both."""
        self.marks.append((time.perf_counter(), sent()))

    def median(self) -> tuple[float, float]:
        """Seconds and bytes of a step; the first two do not count. Zeros where nobody told of steps."""
        pairs = list(pairwise(self.marks))[2:] or [((0.0, 0), (0.0, 0))]
        seconds, sent_bytes = zip(*((after[0] - before[0], after[1] - before[1]) for before, after in pairs))
        return statistics.median(seconds), statistics.median(sent_bytes)


def sent() -> int:
    """Bytes that this network namespace has sent over its link, 0 where there is none."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next((int(line.split()[9]) for line in lines if line.strip().startswith(f"{LINK}:")), 0)


def trained(world: World, batch: int, compress: Literal["none", "bf16"] = "none") -> tuple[float, float]:
    """Seconds and bytes of a step of the real loop."""
    state = TrainState(build_model(NETWORK, 1), Optimizer(lr=1e-4, method=Muon()), PowerEma(), Precision("fp32", CPU))
    settings = Training(batch=batch, images=STEPS * batch, precision="fp32", noise="batch", compress=compress)
    watch, objective = Watch(), Objective(Diffusion(), interleaved=True)
    never = Intervals(log=0, preview=0, evaluate=0, checkpoint=0)
    train(LoopSettings(settings, Optimizer(lr=1e-4), never), state, Task(Images(), Augment(), objective), watch, world)
    return watch.median()


CPU = torch.device("cpu")


def worker(out: Path, megabits: list[float]) -> None:
    """One of the processes: measures a step alone, and with the others at each speed of the link."""
    with init_world() as world:
        world.init_process_group(CPU, 600.0)
        rows = []
        for speed in megabits:
            burst = str(max(65536, int(speed * 1250)))
            rate = ("rate", f"{speed}mbit", "burst", burst, "latency", "400ms")
            subprocess.run(["tc", "qdisc", "replace", "dev", LINK, "root", "tbf", *rate], check=True)
            world.barrier()
            alone, _ = trained(SINGLE_PROCESS, BATCH)  # side by side, each for itself, as they may have to share cores
            for compress in ("none", "bf16"):
                world.barrier()
                seconds, sent_bytes = trained(world, BATCH * world.size, compress)
                row = {"megabits": speed, "compress": compress, "alone": alone}
                rows.append(row | {"seconds": seconds, "sent": sent_bytes})
        small, times = torch.zeros(64), []
        for _ in range(20):
            began = time.perf_counter()
            dist.all_reduce(small)
            times.append(time.perf_counter() - began)
        if world.is_main:
            out.write_text(json.dumps({"message": statistics.median(times), "rows": rows}))


def check(ranks: list[int], megabits: list[float]) -> None:
    """Print, as Markdown, what was measured beside what the model says of it."""
    parameters = sum(p.numel() for p in build_model(NETWORK, 1).parameters())
    print(f"{parameters / 1e6:.2f}M parameters, {BATCH} images a rank\n", flush=True)
    print("| ranks | Mbit/s | gradients | MB sent a step: model | measured | apart | together: model | measured |")
    print("|---|---|---|---|---|---|---|---|")
    for size in ranks:
        with Nodes(size) as nodes, tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            words = [str(Path(__file__).resolve()), "--worker", str(out), "--megabits", *map(str, megabits)]
            all_of_them = [subprocess.Popen(nodes.torchrun(node, str(size), words)) for node in range(size)]
            if sum(process.wait() for process in all_of_them):
                sys.exit("a process failed")
            found = json.loads(out.read_text())
        for row in found["rows"]:
            each = {"none": 4, "bf16": 2}[row["compress"]]
            speed = row["megabits"] * 1e6 / 8
            link = Link(speed, speed, found["message"] / 2 / math.ceil(math.log2(size)), node=size)
            # Arithmetic on the same core hides no exchange, so all of it counts as forward.
            work = Work(parameters, BATCH, math.prod(SHAPE), row["alone"], 0.0, 0.0)
            step, bytes_sent = ddp(work, link, size, each), sent_ddp(parameters, size, each)
            print(
                f"| {size} | {row['megabits']:g} | {'fp32' if each == 4 else 'bf16'} | {bytes_sent / 1e6:.2f} "
                f"| {row['sent'] / 1e6:.2f} | {row['alone']:.2f} s | {step:.2f} s | {row['seconds']:.2f} s |",
                flush=True,
            )


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--check", action="store_true")
    asked.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    asked.add_argument("--megabits", type=float, nargs="+", default=[50, 200, 1000])
    asked.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.worker:
        worker(given.worker, given.megabits)
    elif given.check:
        check(given.ranks, given.megabits)
    else:
        table()


if __name__ == "__main__":
    main()
