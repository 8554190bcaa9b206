"""Memory and micro-batches of several processes: what their traces consist of, and that real ones take it."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import planned
from launches import AGENT, ended, forked, output  # noqa: F401  a fixture
from planned import live, traced
from test_plan_memory import all_traces_are_kept  # noqa: F401  a fixture
from unfog.config.requests.plan import PlanRequest
from unfog.config.schema import Config
from unfog.errors import RequestError
from unfog.models.settings import DiT
from unfog.pipeline.build import build_network
from unfog.planning import flops
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.flops import GB
from unfog.planning.memory_estimate import MemoryEstimator
from unfog.planning.microbatch import MARGIN, memory_upper_bound
from unfog.planning.plan import plan
from unfog.training.settings import AdamW, EmaSnapshots, Optimizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ended")]

CPU = torch.device("cpu")
DEPTH = 2


def config(batch=4, width=64, shard=True, **training) -> Config:
    network = DiT(width=width, depth=DEPTH, head_channels=32, patch=4, modulation="block")
    return planned.config(batch, 16, network, shard=shard, **training)


def most(trace, kind) -> int:
    """The most bytes of a kind at once."""
    now = highest = 0
    for event in trace.events:
        number = event if event >= 0 else ~event
        if trace.kinds[number] == kind:
            now += trace.sizes[number] if event >= 0 else -trace.sizes[number]
            highest = max(highest, now)
    return highest


def test_rows_are_held_and_one_block_is_gathered_while_the_next_travels():
    network = build_network(config())
    whole = sum(p.nbytes for p in network.parameters())
    block = sum(p.nbytes for p in network.blocks[0].parameters())
    around = whole - DEPTH * block
    for device, precision, factor in (("cpu", "fp32", 1.0), ("cuda", "bf16", 0.5)):
        given = config(precision=precision)
        given = replace(given, optimizer=replace(given.optimizer, method=AdamW()))  # two moments for each number
        trace = traced(given, device, 4, 2, processes=4)
        parts = trace.peak(device).parts
        assert parts["parameters"] == pytest.approx(whole / 4, rel=0.02)
        assert parts["average"] == 2 * parts["parameters"]
        assert parts["moments"] == pytest.approx(2 * parts["parameters"], rel=0.02)
        assert not parts["exchange"]
        assert most(trace, "gathered") == pytest.approx(around + factor * block, rel=0.02)
        travelling = [size for size, kind in zip(trace.sizes, trace.kinds) if kind == "workspace"]
        assert sum(abs(size - factor * block) < 0.01 * block for size in travelling) >= 2 * 2 * DEPTH


def test_whole_networks_have_gradients_travel_from_memory_of_their_own():
    alone, several = (MemoryEstimator(config(shard=False), "cpu", n).step(4, False) for n in (1, 8))
    assert several.parts["exchange"] == alone.parts["parameters"] == several.total - alone.total
    assert MemoryEstimator(config(), "cpu", 1).step(4, False).parts == alone.parts  # one process divides nothing


def test_one_process_has_the_whole_for_checkpoints_and_pictures():
    given = replace(config(), ema_snapshots=EmaSnapshots(every=-1))
    whole, parts = (MemoryEstimator(given, "cuda", n).estimate(4, False) for n in (1, 8))
    assert parts.snapshot == pytest.approx(whole.snapshot, rel=0.01)
    assert parts.drawing > whole.weights == parts.weights
    assert parts.step.total < whole.step.total


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.exhaustive
def test_the_glance_is_not_below_the_prediction_for_two_processes(shard):
    for device in ("cpu", "cuda"):
        given = config(shard=shard)
        assert memory_upper_bound(given, given.training.batch) > MemoryEstimator(given, device, 2).training(4, False)


@pytest.mark.exhaustive
def test_micro_batches_of_a_divided_network_follow_from_what_there_is(monkeypatch):
    share = config(12)
    takes = {n: MemoryEstimator(share, "cpu", 2).training(n, False) for n in (4, 12)}

    def settled(available, processes, **training):
        monkeypatch.setattr("unfog.planning.microbatch.available_memory", lambda device: available)
        monkeypatch.setattr("unfog.planning.microbatch.total_memory", lambda device: 2 * available)
        auto = AutoSettings(config(24, **training), None, CPU, lambda: False, processes)
        auto.resolve_microbatch()
        return auto.config.training.microbatch, [choice.reason for choice in auto.choices]

    assert settled(10**12, 2) == (0, [])
    room = int((takes[4] + takes[12]) / 2 / MARGIN)
    count, (reason,) = settled(room, 2)
    assert 4 <= count < 12
    assert takes[4] <= MemoryEstimator(share, "cpu", 2).training(count, False) < MARGIN * room
    assert "all 12 would need" in reason  # of the share of one
    assert settled(int(1.05 * takes[4]), 2, microbatch=4) == (4, [])
    # Processes of one machine share its memory.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert settled(2 * room, 2)[0] == count


def asked(**training) -> Config:
    given = config(4096, **{"steps": 1000, **training})
    return replace(given, source="fashion", optimizer=Optimizer(lr=1e-3))


def planned_for(config: Config, **options):
    return plan(PlanRequest(config.source, config, **options))


@pytest.mark.exhaustive
def test_a_plan_for_several_processes(monkeypatch):
    planned = planned_for(asked(), device="t4", processes=8)
    text = "\n".join(planned.lines())
    for words in (
        "8 processes, the network divided: NVIDIA T4",
        "available each",
        "what they send each other",
    ):
        assert words in text
    plain = json.loads(json.dumps(planned.to_dict()))
    assert (plain["processes"], plain["training"]["shard"]) == (8, True)
    assert planned.memory.step.parts["gathered"] > 0
    assert plain["memory"]["step"] == sum(plain["memory"]["parts"].values()) < 16 * GB
    alone = planned_for(asked(), device="t4")
    assert alone.parameters == planned.parameters
    assert alone.memory.step.total > planned.memory.step.total
    # Arithmetic, by an eighth of the images; launches are as many, and those of so small a network take longer.
    with monkeypatch.context() as patched:
        patched.setattr(flops, "_LAUNCH", 1e-9)
        one, eight = (planned_for(asked(), device="t4", processes=n).times["step"].high for n in (1, 8))
    assert one > 4 * eight
    whole = planned_for(asked(shard=False), device="t4", processes=8)
    assert whole.memory.step.parts["exchange"] == whole.memory.weights
    assert "8 processes, each with all: " in whole.lines()[1]


def test_what_no_plan_can_be_made_of_is_said():
    with pytest.raises(RequestError, match="processes"):
        planned_for(asked(), device="t4", processes=0)
    with pytest.raises(RequestError, match="give --steps or --images"):
        planned_for(asked(steps=0, budget="5m"), device="t4", processes=2)


SCRIPT = """
import sys, torch
from pathlib import Path
sys.path[:0] = [{tests!r}, {tests!r} + "/planning"]
torch.set_num_threads(1)
from planned import black_images, counted_memory, forget_peak
from test_plan_shards import CPU, config
from unfog.pipeline.build import build_state
from unfog.training.distributed.world import init_world
from unfog.training.hooks import TrainingHooks
from unfog.training.loop import LoopSettings, train

class Two(TrainingHooks):
    # No more steps, and no end of a run, at which the first process has the network whole.
    def __init__(self, state):
        self.state = state

    def stop_requested(self):
        return self.state.seen >= 16

def run(config, world):
    state = build_state(config, CPU, home=world.init_device(config.training.shard, CPU))
    if config.training.shard:
        world.shard_state(state)
    forget_peak()
    train(LoopSettings(config.training, config.optimizer), state, black_images(config), Two(state), world)
    world.shards = None

with init_world() as world:
    world.init_process_group(CPU, 120.0)
    run(config(8, 32, {shard}, images=800), world)
    with counted_memory() as found:
        run(config(8, 512, {shard}, images=800), world)
    Path({out!r} + str(world.rank)).write_text(str(*found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts resident memory as Linux does")
@pytest.mark.parametrize("shard", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive
def test_real_processes_take_what_the_trace_says(shard, tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "rank"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), shard=shard, out=str(out)))
    output(forked([2, 0, script], AGENT))
    share = config(4, 512, shard)
    predicted = live(traced(share, "cpu", 4, processes=2))
    found = [int(Path(f"{out}{rank}").read_text()) for rank in range(2)]
    assert predicted > 70e6
    for taken in found:
        assert 0.88 < predicted / taken < 1.12
