"""What `test_distributed` has torchrun start: the loop on several processes, against the loop on one, as JSON."""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from unfog.config.schema import Config
from unfog.data.augmentation import Augment
from unfog.data.settings import Data
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.objective import Loss, Objective
from unfog.diffusion.sampler import Sampler
from unfog.errors import Interrupted, RunError
from unfog.evaluation.held_out import HeldOut, midpoints
from unfog.models.network_settings import build_model
from unfog.models.settings import DiT, MPUNet, UNet
from unfog.process.signals import StopSignals
from unfog.runs.previews import Previews
from unfog.training.checkpoints import snapshot, writer
from unfog.training.checkpoints.load import read_tensors, roll_back
from unfog.training.distributed.fsdp import full_tensor
from unfog.training.distributed.world import SINGLE_PROCESS, init_world
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import Intervals, LoopSettings, train
from unfog.training.precision import Precision
from unfog.training.settings import Muon, Optimizer, PowerEma, Training
from unfog.training.sharded_tensors import is_sharded, to_local
from unfog.training.state import TrainState
from unfog.values.columns import CLASS
from unfog.values.condition_format import ConditionFormat
from unfog.values.conditions import NO_CONDITIONS, Conditions

CPU = torch.device("cpu")
TINY = UNet(channels=(8,), attention=(True,), mid_attention=False, norm_groups=4, head_channels=8)
DROPOUT = replace(TINY, dropout=0.2)
MP = MPUNet(channels=(8, 16), attention=(False, True))
DIT = DiT(width=40, depth=2, head_channels=8)
OPTIMIZER = Optimizer(lr=1e-3, eps=1e-4)  # so that what is rounding is not taken for a direction
FEW = {"shard": True, "architecture": DIT}  # parts that have to be brought together
MUON = replace(OPTIMIZER, method=Muon())
KEPT = ("loss", "gradient_norm", "noise_scale", "gradient_signal", "gradient_noise")
EVERY = Intervals(log=1, preview=0, evaluate=0, checkpoint=0)


class Images:
    """A stream of forty fixed images."""

    def __init__(self):
        self.all = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))

    def batch(self, first, size):
        index = torch.arange(first, first + size) % 40
        return type("Batch", (), {"pixels": self.all[index], "conditions": Conditions(index % 3)})


class Diary(TrainingHooks):
    """Keeps the losses; goes back to what it kept at the beginning; saves what is divided where it is told to."""

    place = Path(sys.argv[1]).parent / "checkpoints"

    def __init__(self, into, stop_at=None):
        self.rows, self.refusals, self.shrinks, self.roll_backs = [], [], 0, 0
        self.saved, self.once, self.numbers = None, False, []
        self.into, self.stop_at = into, stop_at
        self.good = [p.detach().clone() for p in into.model.parameters()]

    def log(self, step, images, record):
        self.rows.append({k: record[k] for k in KEPT if k in record})

    def stop_requested(self):
        return self.stop_at is not None and self.into.seen >= self.stop_at

    def on_skipped_step(self, state, norm, report):
        self.refusals.append(None if report is None else [report.phase, list(report.images)])

    def on_out_of_memory(self, state):
        self.shrinks += 1

    def roll_back(self, state, reason):
        self.roll_backs += 1
        if self.saved:
            roll_back(self.saved, state)
            return str(self.saved)
        with torch.no_grad():
            for p, good in zip(state.model.parameters(), self.good):
                p.copy_(good)
        guard = {**state.guard.state_dict(), "recent": []}
        state.roll_back_to({"seen": 0, "updates": 0, "guard": guard, "keys": {}, "scaler": {}})
        return ""

    def prepare_save(self, state):
        self.place.mkdir(exist_ok=True)
        return str(self.place)

    def save_shards(self, state, for_best, place, post):
        if not (self.saved and self.once):
            taken = snapshot.take_snapshot(state, state.seen)
            self.numbers += [t.numel() for part in taken.tensors.values() for t in part.values()]
            writer._write_shard(taken, Path(place), post, threading.Event())
            self.saved = Path(place, f"{state.seen:08d}")


def state(architecture, precision="fp32", optimizer=OPTIMIZER):
    torch.manual_seed(0)
    model = build_model(architecture, 1, ConditionFormat.numbered(3, 9))
    with torch.no_grad():  # much begins at zero, where nothing would depend on anything
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape))
    return TrainState(model, optimizer, PowerEma(), Precision(precision, CPU), PowerEma(0.05))


def trained(
    world,
    architecture=TINY,
    batch=8,
    steps=4,
    around=None,
    stop_at=None,
    precision="fp32",
    adaptive=0.0,
    optimizer=OPTIMIZER,
    shard=False,
    images=None,
    **settings,
):
    into = state(architecture, precision, optimizer)
    into.model.checkpointing = settings.get("checkpointing", False)
    diary = Diary(into, stop_at)
    if shard and world.size > 1:
        world.shard_state(into)
    interleaved = settings.get("noise") == "batch"
    objective = Objective(Diffusion(adaptive=adaptive), 0.2, interleaved, into.levels)
    loss = objective if around is None else around(objective, into, world)
    chosen = Training(batch=batch, images=steps * batch, precision=precision, **settings)
    if shard:
        into.due = ["save"]
    train(
        LoopSettings(chosen, optimizer, EVERY),
        into,
        Task(images or Images(), Augment(flip=True, augment=0.3), loss),
        diary,
        world,
    )
    into.found = [full_tensor(t).clone() for part in into.tensors().values() for t in part.values()]
    world.shards = None
    return into, diary


def tensors(of):
    return of.found


def difference(a, b, compared=KEPT):
    """Largest difference of weights and averages, and of what was logged, relative to its size."""
    apart = max(float((x.float() - y.float()).abs().max()) for x, y in zip(tensors(a[0]), tensors(b[0]), strict=True))
    pairs = [(r[k], s[k]) for r, s in zip(a[1].rows, b[1].rows, strict=True) for k in {*compared} & r.keys() & s.keys()]
    logged = max(abs(x - y) / abs(x) for x, y in pairs)
    return {"weights": apart, "logged": logged, "rows": len(a[1].rows)}


def alike(world, of):
    """Whether every process has the same bits."""
    mine = torch.cat([t.flatten().float() for t in tensors(of)])
    least, most = world.all_reduce(-mine.clone()), world.all_reduce(mine.clone())
    return bool(torch.equal(-least, most) and torch.equal(most, mine * world.size)) and of.seen


def equal(world, alone=None, **settings):
    """Several processes against one, and against themselves."""
    several = trained(world, **settings)
    same = alike(world, several[0])
    again = trained(world, **settings)
    if not world.is_main:
        return None
    repeated = all(torch.equal(x, y) for x, y in zip(tensors(several[0]), tensors(again[0]), strict=True))
    one = trained(SINGLE_PROCESS, **(settings if alone is None else {**settings, **alone}))
    return difference(one, several) | {"same": same, "repeated": repeated}


def divided(world, again=False, **settings):
    """Several processes that divide the network against one, and against themselves."""
    several = trained(world, shard=True, **settings)
    repeat = trained(world, shard=True, **settings) if again else several
    if not world.is_main:
        return None
    repeated = all(torch.equal(x, y) for x, y in zip(tensors(several[0]), tensors(repeat[0]), strict=True))
    # The noise scale is of other first passes.
    return difference(trained(SINGLE_PROCESS, **settings), several, KEPT[:2]) | {"repeated": repeated}


class Sums(nn.Module):
    """A network of which the gradient is known: all ones, whatever it holds and is given."""

    def __init__(self):
        super().__init__()
        self.rows, self.number = nn.Parameter(torch.zeros(5, 2)), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return (self.rows.sum() + self.number).expand(len(x))


def noise(world):
    """What a divided network finds out of its noise scale, where the gradient of an image is its label plus one."""
    into = TrainState(Sums(), OPTIMIZER, PowerEma(), Precision("fp32", CPU))
    diary = Diary(into)
    world.shard_state(into)

    def loss(network, x0, conditions):
        per_image = (conditions.label + 1) * network(x0)
        return Loss(per_image, torch.full_like(per_image, 0.5), torch.ones_like(per_image))

    settings = Training(batch=10, images=20, microbatch=3, noise="batch")
    train(LoopSettings(settings, OPTIMIZER, EVERY), into, Task(Images(), Augment(), loss), diary, world)
    return diary.rows


def compressed(world):
    """What the gradients are that travel, and what comes of it."""
    sent, real = [], dist.all_reduce

    def counting(tensor, *rest, **options):
        if options.get("async_op"):  # a step's own message waits
            sent.append(tensor)
        return real(tensor, *rest, **options)

    dist.all_reduce = counting
    try:
        found = equal(world, compress="bf16")
    finally:
        dist.all_reduce = real
    parameters = sum(p.numel() for p in state(TINY).model.parameters())
    per_parameter = sum(one.nbytes for one in sent) / parameters / 8  # of two times four steps
    return found and found | {"types": sorted({str(one.dtype) for one in sent}), "bytes": per_parameter}


def short_of_memory(objective, into, world):
    """The last process cannot take more than one image at a time from the second step on."""

    def loss(network, x0, conditions):
        if world.rank == world.size - 1 and into.seen >= 8 and len(x0) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return objective(network, x0, conditions)

    return loss


def sick(objective, into, world):
    """The last image of the second step has a loss that is not finite, which is replayed when that is refused."""

    def loss(network, x0, conditions):
        found = objective(network, x0, conditions)
        last = into.seen == 8 and world.rank == world.size - 1
        if last or len(x0) == 8:  # of which only a replay has so many
            found = found._replace(per_image=found.per_image.index_fill(0, torch.tensor([len(x0) - 1]), torch.nan))
        return found

    return loss


def refuses(world, shard=False, **settings):
    """One step is refused by all, for the image of one of them."""
    into, diary = trained(world, around=sick, shard=shard, **settings)
    same = shard or alike(world, into)
    return {"refusals": diary.refusals, "updates": into.updates, "same": same, "rows": diary.rows}


def stops(world, shard=False, **settings):
    """The last process alone is asked to stop after the third step."""
    into, _ = trained(world, steps=9, stop_at=24 if world.rank == world.size - 1 else None, shard=shard, **settings)
    return {"seen": into.seen, "same": shard or alike(world, into)}


def abandons(world, shard=False, **settings):
    """The last process waits for the images of the fourth step, and is asked to stop: none takes that step."""

    class Away(Images):
        def batch(self, first, size):
            if world.rank == world.size - 1 and first >= 24:
                raise Interrupted
            return super().batch(first, size)

    into, _ = trained(world, steps=9, images=Away(), shard=shard, **settings)
    reference, _ = trained(world, steps=3, shard=shard, **settings)
    same = all(torch.equal(a, b) for a, b in zip(into.found, reference.found, strict=True))
    return {"seen": into.seen, "updates": into.updates, "same": same}


def diverges(world, **settings):
    """Every step is out of bounds, so that all go back, and give up alike."""

    def around(objective, into, _world):
        def loss(network, x0, conditions):
            found = objective(network, x0, conditions)
            return found._replace(error=found.per_image.detach() * 1e3)

        return loss

    try:
        into, diary = trained(world, steps=12, around=around, patience=2, rollbacks=2, **settings)
    except RunError as error:
        return str(error)[:40]
    return [into.guard.roll_backs, diary.roll_backs]


def goes_back(world):
    """A divided network leaves a checkpoint, then loses its way, and goes back: to the bit."""
    into, objective = state(DIT), Objective(Diffusion(), 0.2)

    def loss(network, x0, conditions):
        found = objective(network, x0, conditions)
        return found._replace(error=found.per_image.detach() * 1e3) if into.seen >= 16 else found

    diary = Diary(into)
    diary.once = True
    world.shard_state(into)
    settings, every = Training(batch=8, images=32, patience=2), EVERY._replace(checkpoint=2)
    train(LoopSettings(settings, OPTIMIZER, every), into, Task(Images(), Augment(), loss), diary, world)
    world.shards = None
    held = {file: {name: full_tensor(t) for name, t in part.items()} for file, part in into.tensors().items()}
    saved = {file: read_tensors(diary.saved / f"{file}.safetensors", diary.saved) for file in held}
    same = [
        tensors.keys() == saved[file].keys() and tensors[name].equal(saved[file][name])
        for file, tensors in held.items()
        for name in tensors
    ]
    if world.rank == world.size - 1:
        to_local(next(filter(is_sharded, into.model.parameters()))).fill_(torch.nan)
    parts = world.all_reduce(torch.eye(world.size)[world.rank] * sum(diary.numbers)).tolist()
    return {
        "roll_backs": [diary.roll_backs, into.guard.roll_backs, into.updates],
        "same": len(same) > 100 and all(same),
        "parts": parts,
        "bad": into.non_finite(),
        "whole": sum(t.numel() for part in held.values() for t in part.values()),
        "torch": all(t.equal(of[name]) for of in [by_torch(diary.saved, "ema")] for name, t in held["ema"].items()),
    }


def killed(world):
    """The last process is killed when its part of the second checkpoint is on disk, and nobody knows of it yet."""
    into = state(DIT)
    diary = Diary(into)
    world.shard_state(into)
    diary.save_shards(into, False, diary.prepare_save(into), world.new_shard_status_store())
    world.barrier()
    if world.rank == world.size - 1:
        snapshot.Snapshot.verify_files = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    into.seen = 8
    diary.save_shards(into, False, diary.place, world.new_shard_status_store())


def by_torch(folder, file):
    """What torch's own reader makes of the parts of a file."""
    with tempfile.TemporaryDirectory() as place:
        for path in folder.glob(f"{file}-*"):
            shutil.copy(path, place)
        found = {name: torch.empty_like(t) for name, t in read_tensors(folder / f"{file}.safetensors", folder).items()}
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(place))
    return found


def memory(world):
    into, diary = trained(world, around=short_of_memory)
    return {
        "microbatch": into.microbatch,
        "shrinks": diary.shrinks,
        "same": alike(world, into),
        "rows": len(diary.rows),
    }


def classes(*labels):
    return ((CLASS, labels),)


def samples_and_loss(shown):
    return [shown.samples(5, classes(0, 2)).tolist(), shown.samples(1, classes(1)).tolist(), shown.held_out_loss()]


def previews(world):
    """Samples and held-out losses by all ranks, against one; and those of ranks that fail, or that nobody waits for."""
    into = state(TINY)
    config = Config(network=TINY, data=Data(size=8, channels=1), classes=("a", "b", "c"), sampler=Sampler(steps=3))
    held_out = HeldOut(torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1)), NO_CONDITIONS, midpoints(5))
    jobs, several = [], Previews(config, into, held_out, StopSignals(), world)

    def part(job, rank, ranks):
        jobs.append([rank, ranks, job])
        if job.get("count") == 7:
            raise ValueError("no luck with seven")
        return several.part(job, rank, ranks)

    world.part = part
    together = world.run_on_main("preview", lambda: samples_and_loss(several), shared=True)
    seen = list(jobs)
    try:
        failed = world.run_on_main("preview", lambda: several.samples(7, classes(0)).tolist(), shared=True)
    except RunError as error:
        failed = str(error)
    of_all = world.all_reduce(torch.tensor(float(len(seen))))
    one = Previews(config, into, held_out, StopSignals())
    alone = samples_and_loss(one)
    apart = max(float(np.abs(np.array(a, float) - np.array(b)).max()) for a, b in zip(alone[:2], together[:2]))
    return {"apart": apart, "losses": together[2] == alone[2], "jobs": int(of_all), "failed": failed}


CASES = {
    "previews": previews,
    "plain": equal,
    "uneven": lambda w: equal(w, batch=10, microbatch=3),
    "few": lambda w: equal(w, batch=1, steps=6),
    "adaptive": lambda w: equal(w, adaptive=0.5),
    "accumulated": lambda w: equal(w, microbatch=2, noise="batch", alone={"microbatch": 0}),
    "dropout": lambda w: equal(w, architecture=DROPOUT, microbatch=8 // w.size),
    "bf16": lambda w: equal(w, precision="bf16"),
    "compressed": compressed,
    "stops": stops,
    "abandons": abandons,
    "refuses": refuses,
    "diverges": diverges,
    "memory": memory,
    "divided": lambda w: divided(w, again=True, architecture=DIT, batch=10, microbatch=3, checkpointing=True),
    "divided few": lambda w: divided(w, batch=1, steps=2),
    "divided mp": lambda w: divided(w, architecture=MP, steps=2),
    "divided muon": lambda w: divided(w, architecture=DIT, optimizer=MUON, steps=3),
    "divided fp16": lambda w: divided(w, architecture=DIT, precision="fp16", steps=3),
    "divided noise": noise,
    "divided stops": lambda w: stops(w, **FEW),
    "divided abandons": lambda w: abandons(w, **FEW),
    "divided refuses": lambda w: refuses(w, **FEW),
    "divided goes back": goes_back,
    "divided killed": killed,
    "divided diverges": lambda w: diverges(w, **FEW),
}


def main():
    torch.set_num_threads(1)
    found = {}
    with init_world() as world:
        world.init_process_group(CPU, 120.0)
        for name in sys.argv[2].split(","):
            found[name] = CASES[name](world)
        if world.is_main:
            Path(sys.argv[1]).write_text(json.dumps(found))


main()
