"""A worker rank: it trains with rank 0, and computes its part of previews and evaluations."""

from __future__ import annotations

import math
import socket
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from unfog.config.schema import Config
from unfog.config.toml import from_toml
from unfog.custom import consent
from unfog.data.dataset import Dataset
from unfog.errors import RunError
from unfog.pipeline.build import build_state, open_stream
from unfog.pipeline.load_data import load_images
from unfog.pipeline.skipped_images import FailureReporter
from unfog.process.signals import StopSignals
from unfog.runs.previews import Previews
from unfog.runs.ranks import StoppableHooks, device_for, watch_outages
from unfog.runs.train import run_training_loop
from unfog.text import sanitize
from unfog.training.checkpoints import snapshot
from unfog.training.checkpoints.writer import CheckpointWriter, ShardStatusStore
from unfog.training.distributed.world import World, init_world
from unfog.training.state import TrainState


class _WorkerHooks(StoppableHooks):
    """Hooks of a worker rank: it writes its part of sharded checkpoints, and reports unusable images to rank 0."""

    def __init__(self, stop: StopSignals, dataset: Dataset, world: World, config: Config):
        super().__init__(stop)
        self._dataset, self._world, self._config = dataset, world, config
        self._reported: set[tuple[str, ...]] = set()
        self._writer: CheckpointWriter | None = None

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        """Send rank 0 the images and shards that could not be read here since the last log."""
        # Each rank reads other images, and rank 0 alone writes the record.
        found = FailureReporter.on_this_rank(self._dataset.train)
        self._world.send_report([list(one) for one in sorted(found - self._reported)])
        self._reported |= found

    def save_shards(self, state: TrainState, for_best: bool, place: str, post: ShardStatusStore) -> None:
        self.finish(math.inf)  # rank 0 has seen the last checkpoint complete
        if not state.non_finite():
            self._writer = CheckpointWriter(Path(place), self._config.checkpoint)
            self._writer.submit(snapshot.take_snapshot(state, state.seen // self._config.training.batch), post)

    def finish(self, seconds: float) -> None:
        """Wait at most so long for the checkpoint that is being written."""
        deadline = time.monotonic() + seconds
        while self._writer is not None and self._writer.busy and time.monotonic() < deadline:
            time.sleep(0.01)


def run_worker() -> None:
    """Train as a worker rank, to the end of the run or until rank 0 ends. RunError if this rank sees other images."""
    with init_world() as world:
        received: dict[str, Any] = world.broadcast_object({})
        if not received:  # the run is at its end already
            return
        config = from_toml(received["config"], Config())
        for path in received["trusted"]:  # by the person who has started rank 0
            consent.give(path)
        with StopSignals(quiet=True) as stop:
            if config.training.shard:
                checkpoints = Path(received["checkpoints"])
                check_visible(checkpoints, "where each rank of a sharded run writes its part of a checkpoint", world)
            for folder in config.representation.folders:
                check_visible(folder, "the run's autoencoder", world)
            dataset, found = load_images(config, stop, lost=received["lost"])
            if found.fingerprint != config.fingerprint:
                raise RunError(
                    f"rank {world.rank} finds other images in {sanitize(config.source)} than rank 0 does; each machine "
                    "needs the same ones there"
                )
            _train_worker(config, dataset, stop, world)


def check_visible(folder: Path, what: str, world: World) -> None:
    """RunError if this rank does not see a part of the run folder that it needs."""
    if not folder.is_dir():
        raise RunError(
            f"rank {world.rank} ({socket.gethostname()}) does not see {folder}, {what}; give an --out on a disk that "
            "all machines share"
        )


def _train_worker(config: Config, dataset: Dataset, stop: StopSignals, world: World) -> None:
    device = device_for(config)
    # Ranks on one machine compute on devices of their own; the configuration names that of rank 0.
    own_config = replace(config, training=replace(config.training, device=str(device)))
    state = build_state(own_config, device, home=world.init_device(config.training.shard, device))
    stream = open_stream(dataset, config)
    hooks = _WorkerHooks(stop, dataset, world, config)
    watch_outages(dataset, config, world, stop)

    @cache
    def previews() -> Previews:
        return Previews.build(own_config, dataset, state, stop, world)

    if not config.training.shard:  # else this rank never has the whole network
        world.part = lambda job, rank, ranks: previews().part(job, rank, ranks)
    try:
        run_training_loop(config, state, stream, hooks, world)
    finally:
        hooks.finish(0.8 * config.training.grace)  # a checkpoint counts when all ranks have written their parts
        stream.close()
