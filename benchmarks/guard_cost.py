"""What safety costs: the share of a run's time that goes into guards, and into checkpoints.

    python benchmarks/guard_cost.py [--network tiny] [--batch 64] [--precision bf16] [--steps 200] [--checkpoint 50]

A real session is run, with a clock around each guard: the divergence guard, the look for stops and for RUN/SAVE, the
stretches that a stop waits for, the news of the writer, the heartbeat; and around the snapshot that training waits for
at a checkpoint. Both are shares of the time of the same steps, so that a slow moment of the machine is in both.
The thread that writes is counted apart: it works while training goes on, on whatever core there is.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from unfog.config.presets import preset
from unfog.config.schema import Config, Network
from unfog.config.spec_strings import parse_spec, registry_of
from unfog.data.prepare import prepare
from unfog.data.sources.registry import open_source
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.log_settings import Log
from unfog.reporting.records import read_events
from unfog.runs.ranks import RunContext
from unfog.runs.session import Session
from unfog.training import loop
from unfog.training.settings import Checkpoint, Evaluate, Preview
from unfog.training.stability.divergence import DivergenceGuard

import torch

spent: dict[str, float] = defaultdict(float)


def clocked(owner: Any, name: str, label: str) -> None:
    """Have the time that this function takes added to `spent`."""
    function: Callable[..., Any] = getattr(owner, name)

    def wrapper(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            spent[label] += time.perf_counter() - started

    setattr(owner, name, wrapper)


def clock_edges(stop: StopSignals) -> None:
    """Clock the entry and the exit of undivided stretches, and not what is inside."""
    defer_interrupts = stop.defer_interrupts

    @contextmanager
    def wrapper() -> Iterator[None]:
        started = time.perf_counter()
        context: AbstractContextManager[None] = defer_interrupts()
        with context:
            spent["undivided stretches"] += time.perf_counter() - started
            yield
            started = time.perf_counter()
        spent["undivided stretches"] += time.perf_counter() - started

    stop.defer_interrupts = wrapper  # type: ignore[method-assign]


def settings(given: argparse.Namespace) -> tuple[Config, Any]:
    """The configuration to measure, and its images."""
    base = preset("default")
    words = registry_of(Network)
    assert words is not None
    prepared = prepare(open_source("fashion"), replace(base.data, size=given.size))
    training = replace(
        base.training,
        batch=given.batch,
        images=given.steps * given.batch,
        precision=given.precision,
        device=given.device,
    )
    config = replace(
        base,
        network=parse_spec(words, given.network),
        data=prepared.settings,
        classes=prepared.train.classes,
        training=training,
        optimizer=replace(base.optimizer, lr=1e-4, warmup=10),
        log=Log(every=50),
        preview=Preview(every=-1, images=1),
        evaluate=Evaluate(every=-1),
        checkpoint=Checkpoint(every=given.checkpoint),
    )
    return config, prepared


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="tiny")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=int, default=50)
    given = parser.parse_args()
    config, prepared = settings(given)
    clocked(loop, "summed", "relative loss")
    clocked(DivergenceGuard, "judge", "divergence guard")
    clocked(Session, "stop_requested", "looking for a stop")
    clocked(Session, "save_requested", "looking for RUN/SAVE")
    clocked(Heartbeat, "_beat", "heartbeat")
    clocked(loop, "train", "all")
    from unfog.runs import train as runs
    from unfog.runs.saver import Saver

    runs.train = loop.train  # it has the name already
    clocked(Saver, "report_writer_events", "news of the writer")
    clocked(Saver, "save", "checkpoints, training waits")
    clocked(Session, "preview", "preview")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        (folder / "checkpoints").mkdir(parents=True)
        stop = StopSignals()
        clock_edges(stop)
        with stop, Heartbeat(folder, stop) as pulse:
            context = RunContext(RunFolder(folder), torch.device(given.device), stop, pulse)
            runs.train_session(runs.open_session(context, config, prepared), [])
        saves = [event for event in read_events(folder / "events.jsonl") if event["kind"] == "checkpoint"]
    report(given, config, saves)


def report(given: argparse.Namespace, config: Config, saves: list[dict[str, Any]]) -> None:
    """Print what was spent on what."""
    training = spent.pop("all") - spent.pop("preview")
    waits = spent.pop("checkpoints, training waits")
    writes = sum(event["write_seconds"] for event in saves)
    guards = sum(spent.values())
    print(f"\n{given.network}, {config.data.size}x{config.data.size}, batch {given.batch}, {given.precision}, ", end="")
    print(f"{given.device}, {torch.get_num_threads()} threads: {training / given.steps * 1e3:.1f} ms a step")
    for label, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"  {label:28} {seconds / given.steps * 1e6:8.1f} us a step  {100 * seconds / training:6.3f}%")
    print(f"guards {100 * guards / training:.2f}% of training")
    print(f"{len(saves)} checkpoints of {saves[0]['bytes'] / 1e6:.1f} MB, one in {given.checkpoint} steps: ", end="")
    print(f"training waited {100 * waits / training:.2f}% of its time, the thread wrote for {writes:.2f} s")


if __name__ == "__main__":
    main()
