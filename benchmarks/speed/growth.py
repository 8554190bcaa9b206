"""How costs grow with the work: of a step by batch, resolution and parameters, and of the data by the number of images.

    python benchmarks/speed/growth.py [--most 1000000] [--steps 5] [--only data]

Seconds are of the processor, so that a busy machine changes them little; run it with one thread (OMP_NUM_THREADS=1).
The exponent says how a cost grew since the row above: 1 is with the work, 0 not at all, above 1 faster than the work.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from unfog.config.presets import preset
from unfog.config.schema import Config
from unfog.data.dataset import ImageSet
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.data.sources.storage import _LocalStorage
from unfog.data.stream import ImageStream
from unfog.data.webdataset import shard_index
from unfog.data.webdataset.index_entry import ROW_DTYPE, IndexEntry
from unfog.models.settings import UNet
from unfog.pipeline.build import build_augmentation, build_loss, build_state
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import LoopSettings, train

import numpy as np
import torch

CPU = torch.device("cpu")
SHARDS, FAR = 4, 10**15  # files of an index; a position that a run never reaches


class Clock(TrainingHooks):
    """Notes the processor's time after each step, and ends after some."""

    def __init__(self, steps: int):
        self.steps, self.times = steps, [time.process_time()]

    def on_step_end(self, step: int) -> None:
        """Note the time."""
        self.times.append(time.process_time())

    def stop_requested(self) -> bool:
        """After enough steps."""
        return len(self.times) > self.steps + 2  # the first two also allocate

    def seconds(self) -> float:
        """Median of a step."""
        times = self.times[2:]
        return statistics.median(b - a for a, b in itertools.pairwise(times))


def settings(batch: int = 8, size: int = 16, width: int = 16) -> Config:
    """A small U-Net of two levels, with AdamW."""
    network = UNet(channels=(width, 2 * width), attention=(False, False), mid_attention=False, norm_groups=8)
    base = preset("default")
    training = replace(base.training, batch=batch, images=10**9, precision="fp32", device="cpu")
    return replace(base, network=network, data=replace(base.data, size=size, channels=3), training=training)


def step(config: Config, steps: int) -> tuple[float, int]:
    """Seconds of a training step, and parameters."""
    state = build_state(config, CPU)
    images = ImageSet(np.zeros((100, *config.input_shape), np.uint8), ["image"] * 100)
    stream, run = ImageStream(images, 0), Clock(steps)
    augment, loss = build_augmentation(config), build_loss(config, state)
    train(LoopSettings(config.training, config.optimizer), state, Task(stream, augment, loss), run)
    return run.seconds(), sum(p.numel() for p in state.model.parameters())


def grown(rows: Sequence[tuple[float, float]]) -> Iterator[str]:
    """The exponent of each (work, cost) since the one before."""
    yield ""
    for (work, cost), (more, dearer) in itertools.pairwise(rows):
        yield f"{math.log(dearer / cost) / math.log(more / work):.2f}"


def steps_by(name: str, configs: Sequence[Config], work: str, steps: int) -> None:
    """Print the time of a step for each of some settings."""
    rows = []
    for config in configs:
        seconds, parameters = step(config, steps)
        amount = {
            "images": config.training.batch,
            "pixels": config.image_format.pixels * config.training.batch,
            "parameters": parameters,
        }
        rows.append((float(amount[work]), seconds))
    print(f"\n{name:12} {work:>12} {'ms a step':>12} {'exponent':>9}")
    for (amount_of, seconds), exponent in zip(rows, grown(rows)):
        print(f"{'':12} {amount_of:12,.0f} {seconds * 1e3:12.1f} {exponent:>9}")


def index(folder: Path, images: int) -> Path:
    """A set of shards with so many images and its index, as going through them leaves it; the shards are holes."""
    folder.mkdir()
    each = images // SHARDS
    for k in range(SHARDS):
        with (folder / f"s-{k}.tar").open("wb") as file:
            file.truncate(each * 1024)
    kept = shard_index.cache_folder() / "shards"
    kept.mkdir(parents=True, exist_ok=True)
    for path, state in _LocalStorage().states(sorted(str(path) for path in folder.iterdir())).items():
        rows = np.zeros(each, ROW_DTYPE)
        rows["start"], rows["size"], rows["name"] = np.arange(each) * 1024 + 512, 512, np.arange(each) * 12
        rows["label"] = np.arange(each) % 10
        names = b"".join(b"%08d.png" % i for i in range(each))
        piece = IndexEntry(rows, names, [("class", str(i)) for i in range(10)])
        piece.save(kept / f"{shard_index.shard_key(path, state)}.piece.npz")
    open_source(folder)  # combines them
    gc.collect()
    return folder


def resident() -> int:
    """Bytes of memory that this process has; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def opened(folder: Path) -> tuple[float, int, float, float]:
    """(seconds until it can be trained on, bytes of memory for it, seconds to place a batch of 64, the same far on)."""
    before, begun = resident(), time.process_time()
    prepared = prepare(open_source(folder), Data(size=8, channels=3, cache="none", held_out=0.01))
    seconds, held = time.process_time() - begun, resident() - before
    stream = ImageStream(prepared.train, 0)
    return seconds, held, placed(stream, 0), placed(stream, FAR)


def placed(stream: ImageStream, first: int) -> float:
    """Seconds to find out which images a batch has, the least of some."""
    spent = []
    for i in range(50):
        begun = time.process_time()
        stream.index(first + 64 * i, 64)
        spent.append(time.process_time() - begun)
    return min(spent[1:])


def data(most: int) -> None:
    """Print what sets of more and more images cost."""
    print(f"\n{'images':>12} {'opening s':>10} {'exponent':>9} {'memory MB':>10} {'batch us':>9} {'far us':>9}")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        os.environ["UNFOG_CACHE"] = str(Path(name) / "cache")
        counts = [10**k for k in range(3, int(math.log10(most)) + 1)]
        for count in counts:
            seconds, held, near, far = opened(index(Path(name) / str(count), count))
            rows.append((float(count), seconds))
            exponent = list(grown(rows))[-1]
            print(f"{count:12,} {seconds:10.3f} {exponent:>9} {held / 1e6:10.1f} {near * 1e6:9.0f} {far * 1e6:9.0f}")


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=10**7, help="images")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", choices=["data", "steps"])
    given = parser.parse_args()
    if given.only != "steps":
        data(given.most)
    if given.only != "data":
        steps_by("batch", [settings(batch=n) for n in (4, 8, 16, 32)], "images", given.steps)
        steps_by("resolution", [settings(size=n) for n in (8, 16, 32, 64)], "pixels", given.steps)
        steps_by("network", [settings(width=n) for n in (16, 32, 64)], "parameters", given.steps)


if __name__ == "__main__":
    main()
