"""What the trainer costs: a step of `unfog train` against the bare step of the same network and the textbook loop.

    python benchmarks/speed/step_overhead.py [--network tiny] [--batch 64] [--precision bf16] [--rounds 5] [--steps 12]
        [--loops bare unfog] [--clock cpu]

Three ways to train one network on the same 9,000 images, in alternating rounds of one process, so that a slow moment of
the machine hits all of them. Reported: median milliseconds a step, and ratios of these medians.

- bare: forward, mean squared error, backward, the run's optimiser; one batch that stays where it is; no noise is drawn.
- unfog: the session of `unfog train`, with data, noise, clipping, guard, EMA, log (every 10 steps) and progress.
  With `--clock cpu`, seconds of the processor: of one thread (OMP_NUM_THREADS=1) they say the same, and on a busy
  machine they say it still. They count the threads that read ahead, beat and write as well.
- textbook: a PNG opened by PIL for each image, AdamW, clipping, an EMA loop over parameters, `loss.item()` and a
  progress postfix each step, as tutorials have it; at the same precision, and in fp32.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from unfog.config.presets import preset
from unfog.config.schema import Config, Network
from unfog.config.spec_strings import parse_spec, registry_of
from unfog.data.dataset import Dataset
from unfog.data.prepare import prepare
from unfog.data.sources.registry import open_source
from unfog.pipeline.build import build_network
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.log_settings import Log
from unfog.reporting.recorder import Recorder
from unfog.runs.ranks import RunContext
from unfog.runs.train import open_session, run_training_loop
from unfog.training.optimizers import build_optimizer
from unfog.training.precision import Precision
from unfog.training.settings import Checkpoint, Evaluate, PrecisionName, Preview
from unfog.values.image_format import pillow_mode

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

Steps = Callable[[int], list[float]]  # number of steps -> seconds of each
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
now = CLOCKS["wall"]


def timed(step: Callable[[], None], count: int) -> list[float]:
    """Seconds of each of `count` calls."""
    marks = [now()]
    for _ in range(count):
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks.append(now())
    return [b - a for a, b in pairwise(marks)]


def bare(config: Config, device: torch.device) -> Steps:
    """Forward, loss, backward, optimiser: the least that a step can be."""
    network = build_network(config).to(device).train()
    optimizer = build_optimizer(network, replace(config.optimizer, lr=1e-5), torch.float32)
    precision = Precision(config.training.precision, device)
    shape = (config.training.batch, *config.input_shape)
    x, y = torch.randn(shape, device=device), torch.randn(shape, device=device)
    t = torch.rand(shape[0], device=device) * 1000
    label = torch.randint(0, len(config.classes), (shape[0],), device=device) if config.classes else None

    def step() -> None:
        with precision.autocast():
            loss = F.mse_loss(network(x, t, label).float(), y)
        precision.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return lambda count: timed(step, count)


def unfog(config: Config, prepared: Dataset, device: torch.device, folder: Path) -> Steps:
    """The session that `unfog train` runs, stopped and continued between rounds."""
    marks: list[float] = []
    wanted = 0
    stop = StopSignals()
    context = RunContext(RunFolder(folder), device, stop, Heartbeat(folder, stop))
    session = open_session(context, config, prepared)
    session.stop_requested = lambda: len(marks) > wanted  # type: ignore[method-assign]
    session.attach(Recorder(folder, config.log, total=None))
    advance = session.recorder.update_progress

    def note(step: int) -> None:
        advance(step)
        marks.append(now())

    session.recorder.update_progress = note  # type: ignore[method-assign]

    def steps(count: int) -> list[float]:
        nonlocal wanted
        marks[:] = [now()]
        wanted = count
        run_training_loop(config, session.state, session.stream, session, context.world)
        return [b - a for a, b in pairwise(marks)]

    return steps


class Pictures(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """PNG files, opened when asked for."""

    def __init__(self, prepared: Dataset, folder: Path):
        self.paths: list[Path] = []
        for i in range(len(prepared.train)):
            image = np.ascontiguousarray(prepared.train.pixels[i].transpose(1, 2, 0).squeeze())
            self.paths.append(folder / f"{i}.png")
            Image.fromarray(image).save(self.paths[-1])
        self.format, self.labels = prepared.settings.image_format, prepared.train.labels
        self.mode = pillow_mode(self.format.channels)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        image = Image.open(self.paths[i]).convert(self.mode).resize((self.format.width, self.format.height))
        x = torch.from_numpy(np.asarray(image).copy()).float().div(255)
        x = x[None] if x.ndim == 2 else x.permute(2, 0, 1)
        return (x - 0.5) / 0.5, 0 if self.labels is None else int(self.labels[i])


def textbook(config: Config, prepared: Dataset, device: torch.device, folder: Path, arithmetic: PrecisionName) -> Steps:
    """The loop that tutorials print, on the same network."""
    network = build_network(config).to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-4, betas=(0.9, 0.999))
    precision = Precision(arithmetic, device)
    loader = DataLoader(Pictures(prepared, folder), config.training.batch, shuffle=True, drop_last=True)
    shadow = {name: p.data.clone() for name, p in network.named_parameters()}
    angle = (torch.linspace(0, 1, 1001, device=device) + 0.008) / 1.008 * torch.pi / 2
    alpha_bar = (angle.cos() ** 2)[1:].clamp(1e-5, 1)
    bar = tqdm(desc="textbook", mininterval=0.1, leave=False, file=io.StringIO())

    def endless() -> Iterator[list[torch.Tensor]]:
        while True:
            yield from loader

    batches = endless()

    def step() -> None:
        images, label = (tensor.to(device) for tensor in next(batches))
        t = torch.randint(0, 1000, (len(images),), device=device)
        noise = torch.randn_like(images)
        a = alpha_bar[t][:, None, None, None]
        with precision.autocast():
            predicted = network(a.sqrt() * images + (1 - a).sqrt() * noise, t, label if config.classes else None)
            loss = F.mse_loss(predicted.float(), noise)
        precision.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in network.named_parameters():
            shadow[name].mul_(0.9999).add_(p.data, alpha=1 - 0.9999)
        bar.set_postfix(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        bar.update()

    return lambda count: timed(step, count)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="tiny")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--loops", nargs="+", default=["bare", "unfog", "textbook", "textbook fp32"])
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    given = parser.parse_args()

    global now
    now = CLOCKS[given.clock]
    device = torch.device(given.device)
    base = preset("default")
    words = registry_of(Network)
    assert words is not None
    prepared = prepare(open_source("fashion"), replace(base.data, size=given.size))
    config = replace(
        base,
        network=parse_spec(words, given.network),
        data=prepared.settings,
        classes=prepared.train.classes,
        training=replace(
            base.training, batch=given.batch, images=10**9 * given.batch, precision=given.precision, device=given.device
        ),
        log=Log(every=10),
        preview=Preview(every=-1),
        evaluate=Evaluate(every=-1),
        checkpoint=Checkpoint(every=-1),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "png").mkdir()
        makers: dict[str, Callable[[], Steps]] = {
            "bare": lambda: bare(config, device),
            "unfog": lambda: unfog(config, prepared, device, folder / "run"),
            "textbook": lambda: textbook(config, prepared, device, folder / "png", given.precision),
            "textbook fp32": lambda: textbook(config, prepared, device, folder / "png", "fp32"),
        }
        loops = {name: makers[name]() for name in dict.fromkeys(["bare", *given.loops])}
        times: dict[str, list[float]] = {loop: [] for loop in loops}
        for steps in loops.values():
            steps(3)
        for _ in range(given.rounds):
            for loop, steps in loops.items():
                times[loop] += steps(given.steps)
    median = {loop: statistics.median(values) for loop, values in times.items()}
    parameters = sum(p.numel() for p in build_network(config).parameters())
    print(f"\n{parameters / 1e6:.2f}M parameters, {config.image_format.sides}, batch {given.batch}, ", end="")
    print(f"{given.precision}, {given.device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for loop, values in times.items():
        low, high = np.percentile(values, [10, 90]) * 1e3
        ratio = median[loop] / median["bare"]
        print(f"{loop:13} {median[loop] * 1e3:8.1f} ms/step  [{low:.1f}-{high:.1f}]  {ratio:.3f} x bare")
    if "unfog" in median:
        others = [f"{loop} takes {median[loop] / median['unfog']:.2f} times as long" for loop in list(median)[2:]]
        print("; ".join([f"unfog's overhead {100 * (median['unfog'] / median['bare'] - 1):.1f}%", *others]))


if __name__ == "__main__":
    main()
