"""What a checkpoint of a divided network costs each process: time that training is held up, and host memory.

    torchrun --nproc-per-node 2 benchmarks/sharded_checkpoint.py [--width 384] [--depth 6] [--times 3]

Weights, moments and the two averages of the default are there (20 bytes a weight), and no training goes on beside.
Prints a line for each process: seconds in `save` (median), seconds until the checkpoint is there, bytes copied for it,
and by how much the process grew at its peak.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from unfog.models.network_settings import build_model
from unfog.models.settings import DiT
from unfog.training.checkpoints import snapshot
from unfog.training.checkpoints.writer import CheckpointWriter, ShardStatusStore
from unfog.training.distributed.coordination import CoordinatedHooks
from unfog.training.distributed.world import init_world
from unfog.training.hooks import TrainingHooks
from unfog.training.precision import Precision
from unfog.training.settings import Checkpoint, Optimizer, PowerEma
from unfog.training.state import TrainState

import torch
import torch.distributed as dist


class Saves(TrainingHooks):
    """Writes rows, and nothing else."""

    def __init__(self, place: Path):
        self.writer, self.bytes = CheckpointWriter(place, Checkpoint()), 0

    def save_shards(self, state: TrainState, for_best: bool, place: str, post: ShardStatusStore) -> None:
        """Copy the rows that are here, and have them written."""
        taken = snapshot.take_snapshot(state, 1)
        self.bytes = taken.bytes
        self.writer.submit(taken, post)


def resident(what: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at the most since it was set back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


def main() -> None:
    """Save several times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--times", type=int, default=3)
    asked, cpu = parser.parse_args(), torch.device("cpu")
    with init_world() as world:
        world.init_process_group(cpu, 300.0)
        place = Path(world.broadcast_object(tempfile.mkdtemp() if world.is_main else ""))
        torch.manual_seed(0)
        model = build_model(DiT(width=asked.width, depth=asked.depth), 3)
        state = TrainState(model, Optimizer(), PowerEma(), Precision("fp32", cpu), PowerEma(0.05))
        count = sum(p.numel() for p in model.parameters())
        world.shard_state(state)
        for p in state.model.parameters():
            p.grad = torch.ones_like(p)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        run = Saves(place)
        together, held, whole, grown = CoordinatedHooks(run, world), [], [], []
        for _ in range(asked.times):
            dist.barrier()
            Path("/proc/self/clear_refs").write_text("5")
            before, started = resident("VmRSS"), time.perf_counter()
            together.save(state)
            held.append(time.perf_counter() - started)
            while not run.writer.wait(0.01):
                pass
            whole.append(time.perf_counter() - started)
            grown.append(resident("VmHWM") - before)
        line = (
            f"rank {world.rank}: {count / 1e6:.1f}M weights, held up {statistics.median(held):.2f} s, written after "
            f"{statistics.median(whole):.2f} s, copied {run.bytes / 1e6:,.0f} MB, grew {max(grown) / 1e6:,.0f} MB"
        )
        found: list[str] = [""] * world.size
        dist.all_gather_object(found, line)
        if world.is_main:
            print("\n".join(found))


main()
