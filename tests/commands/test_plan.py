"""`unfog plan`: arithmetic counted on the real network, time and memory of machines that are not here, what is said."""

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from conftest import few_images
from planned import TINY
from test_plan_memory import all_traces_are_kept  # noqa: F401  a fixture
from unfog.config.presets import preset
from unfog.config.requests.plan import PlanRequest
from unfog.config.schema import Config, Latents
from unfog.config.toml import from_toml, to_toml, update
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError
from unfog.models.network_settings import take_conditions
from unfog.models.settings import SIZES, UNet
from unfog.models.unet import UNetModel
from unfog.pipeline.build import build_network
from unfog.planning import auto_settings, disk, timing  # the timer is given a clock
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.disk import condition_bytes
from unfog.planning.flops import GB, Device, NetworkCost, TimeRange
from unfog.planning.memory_estimate import MemoryEstimator
from unfog.planning.microbatch import MARGIN, Machine
from unfog.planning.plan import (  # given machines that are not there
    _describe_compiling,
    _resolve_microbatch,
    _time_findings,
    format_time,
    plan,
)
from unfog.planning.timing import StepTime, measure_step, run_times
from unfog.reporting.progress import Progress
from unfog.runs.start import base_settings
from unfog.training.learning_rate import default_learning_rate
from unfog.training.settings import AdamW, Evaluate, Training
from unfog.values.columns import Column
from unfog.values.condition_format import ConditionFormat

pytestmark = pytest.mark.slow

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = UNet((8,), attention=(False,), mid_attention=False, norm_groups=4, head_channels=8)
WIDE = replace(SMALL, channels=(256,))
USUAL = Config().diffusion


def asked(network=TINY, **training) -> Config:
    given, training = preset("default"), {"steps": 1000, **training}
    data, trained = Data(size=16, cache="memory"), replace(given.training, **training)
    optimizer = replace(given.optimizer, lr=1e-3, method=AdamW())  # of few operations, each of which costs a trace time
    return replace(given, source=few_images(), data=data, network=network, training=trained, optimizer=optimizer)


@pytest.mark.parametrize(
    ("device", "side", "given", "batch"),
    [(CPU, 32, 0, 64), (CUDA, 32, 0, 256), (CUDA, 16, 0, 256), (CUDA, 64, 0, 64), (CUDA, 32, 64, 64)],
)
def test_a_gpu_gets_larger_batches_of_small_images(device, side, given, batch, monkeypatch):
    config = replace(preset("default"), data=Data(size=side, channels=3), network=SMALL)
    assert base_settings(config, None, {}).training.batch == 0
    assert base_settings(preset("ddpm"), None, {}).training.batch == 64  # whose learning rate is of that
    config = replace(config, training=replace(config.training, batch=given))
    auto = AutoSettings(config, None, Machine(device), lambda: False)
    auto.resolve_learning_rate()
    assert auto.config.training.batch == batch
    assert [choice.value for choice in auto.choices if choice.name == "batch"] == [256] * (batch == 256)
    parameters = sum(p.numel() for p in build_network(auto.config).parameters())
    usual = default_learning_rate(parameters, batch, SMALL, config.optimizer.method)
    assert auto.config.optimizer.lr == float(f"{usual:.2g}")
    monkeypatch.setattr(auto_settings, "_LARGE_BATCH_ON", ())
    config = replace(config, training=replace(config.training, batch=0))
    assert AutoSettings(config, None, Machine(device), lambda: False).config.training.batch == 64


def test_the_note_of_a_larger_batch_names_latents():
    config = replace(preset("default"), data=Data(size=128, channels=3), network=SMALL, autoencoder_folder="codec")
    config = replace(config, latents=Latents("x", 4, 4, (0.0,) * 4, (1.0,) * 4))
    config = replace(config, training=replace(config.training, batch=0))
    (note,) = (one for one in AutoSettings(config, None, Machine(CUDA), lambda: False).choices if one.name == "batch")
    assert (note.value, "at up to 32 latents" in note.reason) == (256, True)


def test_a_gpu_captures_by_itself_and_compiles_only_once_that_is_on(monkeypatch):
    h100 = Machine(CUDA, "H100", memory=80 * GB, data_sheet=Device.find("h100"))

    def chosen(network=WIDE, diffusion=USUAL, **training):
        config = asked(precision="bf16", batch=256, **training)
        config = replace(config, data=Data(size=32, channels=3), network=network, diffusion=diffusion)
        auto = AutoSettings(config, None, h100, lambda: False)
        auto.resolve_compile()
        auto.resolve_capture()
        return auto.config.training.compile, auto.config.training.capture

    assert chosen(steps=1_000_000) == (False, True)
    assert chosen(steps=1_000_000, compile=True, capture=True) == (True, True)
    monkeypatch.setattr(auto_settings, "_COMPILES_BY_ITSELF", True)
    assert chosen(steps=1_000_000)[0]
    assert not chosen(SMALL, steps=1000)[0]
    assert not chosen(SMALL, steps=100, microbatch=64)[1]
    assert not chosen(replace(SMALL, dropout=0.1), steps=100, checkpointing=True)[1]
    assert not chosen(SMALL, diffusion=replace(Config().diffusion, adaptive=0.5), steps=100)[1]
    with monkeypatch.context() as amd:
        amd.setattr(torch.version, "hip", "7.0")
        assert not chosen(steps=100)[1]
    monkeypatch.setattr(auto_settings, "_CAPTURES_BY_ITSELF", False)
    assert not chosen(steps=100)[1]
    # A setting that is off by a flag stays off.
    assert chosen(steps=1_000_000, compile=False)[0] is False
    assert chosen(SMALL, steps=100, capture=False)[1] is False


def test_a_resume_keeps_what_was_chosen_when_the_run_began(monkeypatch):
    h100 = Machine(CUDA, "H100", memory=80 * GB, data_sheet=Device.find("h100"))
    config = asked(precision="bf16", batch=256, steps=1_000_000)
    config = replace(config, data=Data(size=32, channels=3), network=SIZES["tiny"])
    begun = AutoSettings(config, None, h100, lambda: False)
    begun.resolve_compile()
    begun.resolve_capture()
    stored = from_toml(to_toml(begun.config), Config())
    assert (stored.training.compile, stored.training.capture) == (False, True)
    monkeypatch.setattr(auto_settings, "_COMPILES_BY_ITSELF", True)
    stored = replace(stored, training=replace(stored.training, capture=False))
    # The same holds for a run from before there was the setting.
    for training in (stored.training, replace(stored.training, compile=None, capture=None)):
        resumed = AutoSettings(replace(stored, training=training), None, h100, lambda: False)
        resumed.resolve_resumed(seen=0)
        assert not resumed.config.training.compile
        assert not resumed.config.training.capture


@pytest.mark.parametrize(
    ("before", "now", "compiles"),
    [
        ("cuda", "cpu", False),
        ("cuda:1", "cpu", False),
        ("cuda", "cuda", True),
        ("cuda:1", "cuda:0", True),
        ("cpu", "cpu", True),
    ],
)
def test_a_run_that_leaves_its_gpu_compiles_no_longer_and_says_so(before, now, compiles):
    config = asked(precision="bf16", batch=16, steps=100, compile=True)
    machine = Machine(torch.device(now), "one", memory=80 * GB, data_sheet=Device.find("h100"))
    resumed = AutoSettings(config, None, machine, lambda: False)
    resumed.resolve_resumed(seen=0, before=before)
    assert resumed.config.training.compile is compiles
    said = [f"{note.value} {note.reason}" for note in resumed.choices if note.name == "compile"]
    assert said == ([] if compiles else [f"False the run moves from {before} to {now}, where compiling does not pay"])


def planned_for(config: Config, **options):
    return plan(PlanRequest(config.source, config, **options))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 5, 3, padding=1)

    def forward(self, x, c_noise):
        return self.layer(x * 2)


def test_operations_of_a_convolution():
    work = NetworkCost.of(Convolution, (3, 8, 8))
    assert work.forward == 2 * 8 * 8 * 5 * 3 * 9
    assert work.training == 2 * work.forward  # its input asks for no gradient


class TakesLabel(Convolution):
    """A network of somebody's own whose label has no default."""

    def forward(self, x, c_noise, label):
        return super().forward(x, c_noise)


@pytest.mark.parametrize("classes", [0, 3])
def test_operations_of_a_network_that_needs_a_label(classes):
    format = ConditionFormat.numbered(classes)

    def build():
        network = TakesLabel()
        take_conditions(network, format)
        return network

    work, plain = NetworkCost.of(build, (3, 8, 8), format), NetworkCost.of(Convolution, (3, 8, 8))
    assert (work.forward, work.training) == (plain.forward, plain.training)


def test_conditions_that_are_images_count_as_memory(tmp_path):
    masks, images = np.zeros((6, 1, 8, 16), np.int8), np.zeros((6, 3, 8, 16), np.uint8)
    names = [str(i) for i in range(6)]
    np.save(tmp_path / "masks.npy", masks)

    def bytes_of(values):
        part = ImageSet(images, names, {"mask": Column("mask", "mask", values, ("a", "b"))})
        return condition_bytes(Dataset(Data(size="16x8"), part.subset(slice(4)), part.subset(slice(4, None)), None))

    assert bytes_of(masks) == masks.nbytes
    assert bytes_of(np.load(tmp_path / "masks.npy", mmap_mode="r")) == 0
    part = ImageSet(images, names, {"mask": Column("mask", "mask", masks, ("a", "b"))})
    assert part.device_bytes == images.nbytes + 4 * masks.nbytes  # float32 on a GPU


def test_operations_of_ddpm():
    """6.06 billion multiplications and additions an image, as is told of DDPM's CIFAR-10 network.

    That leaves out the two products of attention, of which it has five layers at 16x16 and one at 4x4.
    """
    work = NetworkCost.of(lambda: UNetModel(SIZES["cifar10"], 3, ConditionFormat()), (3, 32, 32))
    attention = 2 * 256 * (5 * 16**4 + 4**4)
    assert work.forward / 2 - attention == pytest.approx(6.06e9, rel=0.003)
    assert 2.9 < work.training / work.forward < 3.05


@pytest.mark.parametrize("size", [32, 64])
def test_operations_of_attention_are_counted_by_hand(size):
    """Three layers: their products with the weights, and q k^T and its product with v, which grow as size^4."""

    def counted(attends: bool):
        settings = UNet((16, 16), attention=(attends, False), mid_attention=False, norm_groups=4, head_channels=8)
        return NetworkCost.of(lambda: UNetModel(settings, 3, ConditionFormat()), (3, size, size))

    plain, whole, pixels, channels = counted(False), counted(True), size**2, 16
    weights, attention = 3 * 2 * pixels * channels * 4 * channels, 3 * 4 * pixels**2 * channels
    assert whole.forward - plain.forward == weights + attention
    assert whole.training - plain.training == 3 * weights + 3.5 * attention


def test_time_is_arithmetic_or_launches():
    device = Device.find("h100")
    work = NetworkCost.of(Convolution, (3, 8, 8))._replace(training=1e12, forward=3e11, operations=1000)
    fast, slow = work.step_time(device, Training(batch=64, precision="fp16"))
    assert fast == pytest.approx(64e12 / (0.18 * 989e12))
    assert slow == pytest.approx(64e12 / (0.11 * 989e12))
    assert work.step_time(device, Training(batch=64, precision="fp16", compile=True)) < (0.6 * fast, 0.6 * slow)
    assert work.step_time(device, Training(batch=64, precision="fp16", checkpointing=True)).low == pytest.approx(
        1.3 * fast
    )
    assert work.step_time(device, Training(batch=64, precision="fp32")).low > 5 * fast
    assert work.call_time(64, device).low == pytest.approx(0.3 * fast)  # drawn in 16 bits
    assert work.call_time(64, replace(device, precision="fp32")).low > fast
    tiny = work._replace(training=1e6).step_time(device, Training(batch=64, microbatch=32, precision="fp16"))
    assert tiny.low == tiny.high > 1e-3
    captured = Training(batch=64, microbatch=32, precision="fp16", capture=True)
    assert work._replace(training=1e6).step_time(device, captured).high < 1e-4


def test_devices_are_found_however_they_are_written():
    assert Device.find("RTX 4090") is Device.find("nvidia_rtx_4090")
    assert Device.find("RTX 4090").memory == 24 * GB
    assert Device.find("H200").memory == 141 * GB
    with pytest.raises(RequestError, match=r"'h1000'; give one of b200, .* omit --for \(device="):
        Device.find("h1000")


def test_what_a_run_takes_is_the_sum_of_its_parts():
    config = asked(images=64_000, steps=0)
    config = replace(config, preview=replace(config.preview, every=100), evaluate=replace(config.evaluate, every=250))
    times = run_times(config, TimeRange(0.1, 0.2), TimeRange(0.01, 0.02), held_out=40)
    assert times["training (1,000 steps)"] == (100, 200)
    assert times["previews (11)"].low == pytest.approx(11 * 16 * 20 * 0.01)  # the first, nine on the way, the last
    assert times["evaluations (5)"].low == pytest.approx(5 * 40 * 8 * 0.01)
    assert times["in all"].high == pytest.approx(200 + 2 * (11 * 16 * 20 + 5 * 40 * 8) * 0.01)
    assert times["sampling 10,000 images"].low == pytest.approx(10_000 * 20 * 0.01)
    # Samples are guided where the run has a snapshot at 30% of its steps, at 12 of these 20 levels. Previews are not.
    for settings, calls in (({}, 32), ({"ema_snapshots": {"every": 400}}, 20), ({"guide": "none"}, 20)):
        snapshots = {"guide": "auto", "guidance_interval": (0.2, 0.8), "ema_snapshots": {"every": 42}}
        found = run_times(update(config, snapshots | settings, ""), TimeRange(0.1, 0.2), TimeRange(1, 1), held_out=40)
        assert found["sampling 16 images"].low == 16 * calls
        assert found["previews (11)"].low == 11 * 16 * 20
    drawing = replace(config, evaluate=replace(config.evaluate, metrics=("kid",), samples=300, metrics_every=500))
    more = run_times(drawing, TimeRange(0.1, 0.2), TimeRange(0.01, 0.02), held_out=40)
    assert more["sampling for metrics"].low == pytest.approx(2 * 300 * 20 * 0.01)
    assert more["in all"].low == pytest.approx(times["in all"].low + more["sampling for metrics"].low)
    assert format_time(TimeRange(0.0123, 0.2)) == "12 ms to 200 ms"
    assert _time_findings(TimeRange(86400.0, 1e9)) == []
    assert _time_findings(TimeRange(float("nan"), float("nan"))) == []
    assert [one.severity for one in _time_findings(TimeRange(1e7, 1e8))] == ["warning"]


def test_a_plan_for_another_machine():
    planned = planned_for(asked(), device="t4")
    assert planned.config.training.precision == "fp16"
    assert planned.config.training.images == 64_000
    assert not any(finding.severity == "fatal" for finding in planned.findings)
    text = "\n".join(planned.lines())
    for words in ("NVIDIA T4", "estimated", "GFLOP an image", "activations", "training (1,000 steps)", "a checkpoint"):
        assert words in text
    assert "kept on the GPU" in text
    assert not re.search(r"\w 0\.0 MB", text), "parts of the memory that round to 0 are left out"
    assert max(map(len, planned.lines())) < 200
    plain = json.loads(json.dumps(planned.to_dict()))
    assert plain["memory"]["step"] == sum(plain["memory"]["parts"].values()) <= plain["memory"]["peak"] < 16 * GB
    assert not torch.is_inference_mode_enabled()


@pytest.fixture
def auto():
    """Fits what is asked for into so much memory of an RTX 3060: the configuration, choices and findings."""

    def settle(available, device=CUDA, size=16, **training):
        images = ImageSet(np.zeros((1, 1, size, size), np.uint8), ("a",))
        config = replace(asked(SMALL, **training, precision="fp32"), data=Data(size=size, channels=1))
        found = AutoSettings(config, images, Machine(device, "NVIDIA RTX 3060", available), lambda: False)
        return found, _resolve_microbatch(found)

    return settle


def test_what_was_asked_for_and_does_not_fit_is_fatal_and_what_fits_is_said(auto):
    _, (fatal,) = auto(12 * GB, batch=200_000, microbatch=100_000)
    assert (fatal.code, fatal.severity) == ("plan.memory", "fatal")
    assert "NVIDIA RTX 3060 has" in fatal.evidence
    fits = fatal.facts["microbatch"]
    assert 100 < fits < 100_000
    assert fatal.remedy == f"--microbatch {fits} fits"
    chosen, none = auto(12 * GB, batch=200_000)
    assert not none
    assert chosen.config.training.microbatch == fits
    # A context is taken off what is available, once.
    assert MemoryEstimator(chosen.config, "cuda").training(fits, False) < 12 * GB * MARGIN
    kept, none = auto(12 * GB, batch=200_000, microbatch=fits)
    assert (kept.config.training.microbatch, none) == (fits, [])


def test_checkpointing_is_asked_for_by_its_name_and_a_device_by_its_own(auto):
    small = MemoryEstimator(auto(12 * GB, CPU, 32, batch=2)[0].config, "cpu")
    one, again = small.training(1, False), small.training(1, True)
    _, (fatal,) = auto(int((one + again) / 2 / MARGIN), CPU, 32, batch=2, microbatch=2)
    assert "--training.checkpointing" in fatal.remedy
    _, (hopeless,) = auto(again // 2, CPU, 32, batch=2)
    assert "NVIDIA RTX 3060 has" in hopeless.evidence
    assert "cpu" not in hopeless.evidence


def test_what_is_not_known_is_null_in_json(monkeypatch):
    monkeypatch.setattr("unfog.planning.plan.available_memory", lambda device: 10**6)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    planned = planned_for(asked(device="cpu", steps=1, precision="fp32"))
    assert json.loads(json.dumps(planned.to_dict(), allow_nan=False))["seconds"]["step"] == [None, None]
    assert any(line.split() == ["time", "?", "in", "all"] for line in planned.lines())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_compiling_costs_and_gains_is_measured_or_said_to_be_unknown(monkeypatch):
    times = {True: StepTime(41.0, 0.2), False: StepTime(1.0, 0.4)}
    monkeypatch.setattr(auto_settings, "measure_step", lambda config, *_: times[config.training.compile])
    planned = planned_for(asked(device="cpu", precision="fp32", compile=True))
    lines = planned.lines()
    assert not any("do not trust" in line for line in lines)
    assert any("200 ms; do not trust" in line for line in replace(planned, doubt="do not trust").lines())
    said = next(line.split(maxsplit=1)[1] for line in lines if line.split()[0] == "compiling")
    assert said == "takes 41 s, and a step is 2.00 times as fast: it pays from step 200 on"
    times[True] = StepTime(41.0, 0.4)
    found = AutoSettings(asked(compile=True), None, CPU, lambda: False)
    assert _describe_compiling(found).endswith("1.00 times as fast: it never pays")
    assert _describe_compiling(AutoSettings(asked(), None, CPU, lambda: False)) == ""
    elsewhere = AutoSettings(asked(compile=True), None, Machine(CUDA, data_sheet=Device.find("h100")), lambda: False)
    assert "unfog doctor --gpu" in _describe_compiling(elsewhere)


def test_a_step_that_compiles_first_is_not_taken_for_the_pace(monkeypatch):
    """The limit counts from the end of the first step, however long that took."""
    for compiles, steps in ((True, [50.0, 1.0, 1.0, 1.0, 1.0]), (False, [50.0])):
        clock = iter([0.0, *itertools.accumulate(steps)])
        monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))  # noqa: B023
        timer = timing._StepTimer(3.0, Progress("", None), lambda: False, compiles)
        for step in range(len(steps)):
            assert not timer.stop_requested()
            timer.on_step_end(step + 1)
        assert timer.stop_requested()
        assert timer.step_time()[:2] == (50.0, 1.0 if compiles else 50.0)


@pytest.mark.parametrize(("share", "busy"), [(0.3, True), (1.6, False)])
def test_a_pace_is_not_to_be_trusted_if_other_processes_had_the_cores(monkeypatch, share, busy):
    """The first step does not count: other processes may compile for it."""
    wall, spent = [0.0, 10.0, 11.0, 12.0], [0.0, 0.1, 0.1 + share, 0.1 + 2 * share]
    clocks = iter(wall), iter(spent)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clocks[0]))
    monkeypatch.setattr(timing.time, "process_time", lambda: next(clocks[1]))
    timer = timing._StepTimer(3.0, Progress("", None), lambda: False, compiles=True)
    for step in range(3):
        timer.on_step_end(step + 1)
    found = timer.step_time()
    assert found.cores == pytest.approx(share)
    assert found.doubt == "the machine is busy, and the steps had 30% of a core: do not trust this pace" * busy
    assert StepTime(1.0, 1.0).doubt == ""  # of a GPU, whose host waits


def test_so_many_steps_are_timed_at_least_however_slow_they_are(monkeypatch):
    """A step that is captured after three others is not reached within the limit on a slow GPU."""
    clock = itertools.count(step=50.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    timer = timing._StepTimer(3.0, Progress("", None), lambda: False, False, least=4)
    for step in range(4):
        assert not timer.stop_requested()
        timer.on_step_end(step + 1)
    assert timer.stop_requested()


@pytest.mark.parametrize(
    ("operations", "few", "asked_for", "found"),
    [
        (1e13, 2.0, [4], 32.0),  # a step of 64 images would take 32 s
        (1e13, 0.5, [4, 64], 8.0),
        (1e11, 2.0, [64], 8.0),  # of few operations: timed at once
    ],
)
def test_a_slow_step_is_estimated_from_a_few_images(monkeypatch, operations, few, asked_for, found):
    batches = []

    def measured(config, *_, **limits):
        batches.append(config.training.batch)
        assert config.training.microbatch <= config.training.batch
        return StepTime(few, few) if config.training.batch == 4 else StepTime(9.0, 8.0)

    monkeypatch.setattr(timing, "measure_step", measured)
    config = asked(batch=64, microbatch=16)
    step = timing.measure_step_at_most(config, None, CPU, lambda: False, operations)
    assert (batches, step.step) == (asked_for, found)
    assert step.doubt == "estimated from steps of 4 images, as a whole one takes long here" * (asked_for == [4])


def test_a_plan_leaves_random_numbers_alone():
    pixels = np.zeros((8, 1, 16, 16), np.uint8)
    config = replace(asked(batch=2, precision="fp32", device="cpu"), data=Data(size=16, channels=1))
    before = torch.get_rng_state()
    assert measure_step(config, ImageSet(pixels, tuple("abcdefgh")), CPU, lambda: False, 0.01).step > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_budget_is_kept_with_all_that_a_run_does_besides(monkeypatch):
    config = replace(asked(batch=64, steps=0, budget="3m", precision="fp32"), classes=("a", "b"))
    found = AutoSettings(config, None, CPU, lambda: False)
    monkeypatch.setattr(found, "seconds_per_step", lambda: 0.3)
    found.resolve_length()
    found.resolve_intervals()
    call = TimeRange(0.1 / 64, 0.1 / 64)  # a third of a step
    assert run_times(found.config, TimeRange(0.3, 0.3), call, 1000)["in all"].low == pytest.approx(180, rel=0.02)


def test_steps_that_take_minutes_are_not_timed(monkeypatch):
    monkeypatch.setattr("unfog.planning.plan.TOO_SLOW", 1.0)
    planned = planned_for(asked(device="cpu"))
    assert planned.estimated
    assert planned.config.training.precision == "fp32"
    assert 0 < planned.times["step"].low < planned.times["step"].high


def test_processes_that_share_a_cpu_are_not_timed():
    planned = planned_for(asked(device="cpu"), processes=2)
    assert planned.estimated


def test_images_that_are_yet_to_be_decoded_into_memory_count(monkeypatch, tmp_path):
    for i in range(100):
        Image.new("RGB", (16, 16), (i, 0, 0)).save(tmp_path / f"{i}.png")
    monkeypatch.setattr("unfog.data.prepare._MEMORY_FILES", 10)
    monkeypatch.setattr("unfog.planning.timing._TIMED", 4)
    monkeypatch.setattr("unfog.planning.plan.available_memory", lambda device: 10**9)
    config = replace(asked(device="cpu", batch=2), source=str(tmp_path), data=Data(size=16, cache="memory"))
    monkeypatch.setattr("unfog.planning.plan.TOO_SLOW", 1.0)
    images = 100 * 3 * 16**2
    assert planned_for(config).available == 10**9 - images
    monkeypatch.setattr("unfog.planning.plan.available_memory", lambda device: images)
    (fatal,) = [finding for finding in planned_for(config).findings if finding.severity == "fatal"]
    assert (fatal.code, fatal.remedy) == ("plan.memory", "--data.cache disk")
    prepared = prepare(open_source(tmp_path), config.data)  # as they are once the run has them
    assert disk.bytes_to_decode(prepared, config) == 0


def test_a_large_set_is_not_decoded_for_a_plan(monkeypatch, tmp_path):
    for i in range(100):
        Image.new("RGB", (16, 16), (i, 0, 0)).save(tmp_path / f"{i}.png")
    monkeypatch.setattr("unfog.data.prepare._MEMORY_FILES", 10)
    monkeypatch.setattr("unfog.data.prepare.cache.make", None)
    monkeypatch.setattr("unfog.planning.timing._TIMED", 4)
    planned = planned_for(
        replace(asked(device="cpu", precision="fp32", batch=2), source=str(tmp_path), data=Data(size=16))
    )
    assert "decodes first" in planned.disk[0]
    assert planned.times["step"].low > 0
    assert planned.config.data.cache == "auto"


def test_a_plan_for_this_machine_measures_it():
    planned = planned_for(asked(device="cpu", precision="fp32"))
    assert not planned.estimated
    assert 0 < planned.times["step"].low == planned.times["step"].high < 60
    assert planned.times["in all"].low > planned.times["training (1,000 steps)"].low


def test_a_budget_begins_after_what_was_seen(monkeypatch):
    def length(seen):
        found = AutoSettings(asked(batch=64, steps=0, budget="3m", precision="fp32"), None, CPU, lambda: False)
        monkeypatch.setattr(found, "seconds_per_step", lambda: 0.3)
        found.resolve_length(seen=seen)
        return found.config.training.images

    assert length(64 * 5000) == 64 * 5000 + length(0)


def test_a_budget_leaves_the_metrics_their_share(monkeypatch):
    def length(**evaluate):
        config = replace(asked(batch=64, steps=0, budget="30m", precision="fp32"), evaluate=Evaluate(**evaluate))
        found = AutoSettings(config, None, CPU, lambda: False)
        monkeypatch.setattr(found, "seconds_per_step", lambda: 0.3)
        found.resolve_length()
        return found.config.training.images

    assert length(metrics=("kid",), share=0.25) / length() == pytest.approx(1 / 1.25, rel=0.02)
