"""The doctor on settings: each planted fault gives its finding and no other, and sound settings give none."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import unfog.data.augmentation
from conftest import NETWORK
from unfog.checks.run.run_checks import _usual_learning_rate  # each rule is given its numbers
from unfog.checks.settings import learning_rate_checks as rate_checks  # each rule is given its numbers
from unfog.checks.settings import machine_checks as machine  # its parts are given machines that are not there
from unfog.checks.settings import overfit_one_batch as overfitting
from unfog.checks.settings.learning_rate_checks import (  # each rule is given its numbers
    _ema_half_window,
    _ema_share_before,
)
from unfog.checks.settings.machine_checks import _check_precision  # each rule is given a machine that is not there
from unfog.checks.settings.overfit_one_batch import LEARNED, STUCK, OverfitBatch, overfit_one_batch
from unfog.checks.settings.settings_checks import (  # each check is given its settings alone
    _check_range,
    _check_sampler,
    _check_timesteps,
    _evenly_spread_pixels,
    check_sampling,
    check_settings,
)
from unfog.config.presets import preset
from unfog.config.schema import Config
from unfog.config.toml import update
from unfog.config.validate import resolve_sampler
from unfog.data.dataset import Dataset
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VE, Cosine, Flow, FlowUniform, Linear, LogNormal
from unfog.diffusion.objective import Objective
from unfog.diffusion.target import X0, EdmF, Eps, FlowVelocity, V
from unfog.diffusion.weighting import Edm, InverseSnr, MinSnr, Snr
from unfog.errors import Interrupted, RequestError
from unfog.models.settings import UNet
from unfog.pipeline.build import build_network, build_state
from unfog.planning import disk
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.disk import disk_space_needed
from unfog.planning.timing import forward_passes
from unfog.process.run_folder import RunFolder
from unfog.training.learning_rate import default_learning_rate
from unfog.training.settings import Checkpoint, FixedEma, Muon, PowerEma
from unfog.values.image_format import BYTES, ImageFormat, StoredValues

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NO_FOLDER = RunFolder(Path("none"))
SEVERE = ("fatal", "warning")


def test_a_rate_far_above_the_usual_is_named_for_a_step_that_was_not_finite():
    config = replace(Config(source="x"), network=UNet())
    usual = default_learning_rate(10**6, config.training.batch, config.network, config.optimizer.method)
    for times, said in ((2.0, ""), (1000.0, f"1,000 times the usual {usual:.2g}: lower it first")):
        changed = replace(config, optimizer=replace(config.optimizer, lr=times * usual))
        found = rate_checks.describe_high_rate(changed, 10**6)
        assert said in found
        assert bool(said) == bool(found)
    assert "500 times the usual" in rate_checks.describe_high_rate(changed, 10**6, scale=0.5)  # after a roll-back
    assert rate_checks.describe_high_rate(changed, 10**6, scale=1e-3) == ""


@pytest.fixture(scope="module")
def fashion():
    return prepare(open_source("fashion"), Data(cache="memory"))


def settled(prepared, name="default", **settings):
    """A configuration with every choice made; the length in images so that nothing is measured."""
    base = preset(name)
    base = replace(base, training=replace(base.training, budget=""))
    settings = {"network": NETWORK, "training": {}, **settings}
    settings["training"] = {"images": 200_000, "precision": "fp32", "device": "cpu", **settings["training"]}
    config = replace(update(base, settings, ""), source="fashion")
    data = replace(config.data, size=prepared.settings.size, channels=prepared.settings.channels)
    config = replace(config, data=data, classes=prepared.train.classes)
    auto = AutoSettings(config, prepared.train, CPU, lambda: False)
    auto.resolve_network()
    auto.resolve_learning_rate()
    auto.resolve_length()
    auto.resolve_intervals()
    return auto.config


def examined(config, prepared, **more):
    return {f.code: f for f in check_settings(config, prepared, CPU, **more)}


def severe(findings):
    return {code: f.severity for code, f in findings.items() if f.severity in SEVERE}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("default", {}),
        ("default", {"network": "auto"}),
        ("default", {"training": {"images": 5_000_000, "batch": 256}}),
        ("default", {"training": {"images": 2_000_000}, "ema": "fixed"}),
        ("demo", {"network": "tiny", "training": {"images": 92_224}}),
        ("ddpm", {"training": {"images": 200_000 * 64}}),
        ("ddpm", {"network": "tiny", "training": {"images": 20_000 * 64}}),
        ("ddpm", {"diffusion": {"schedule": "linear"}, "training": {"images": 10_000_000, "batch": 128}}),
        (
            "default",
            {
                "diffusion": {
                    "path": "ve",
                    "schedule": "lognormal",
                    "target": "edm",
                    "weighting": "edm",
                    "conditioning": "logsnr",
                    "scale_input": True,
                }
            },
        ),
    ],
)
def test_sound_settings_raise_no_alarm(fashion, name, settings):
    findings = examined(settled(fashion, name, **settings), fashion)
    assert len(findings) == 20
    assert severe(findings) == {}, [str(f) for f in findings.values() if f.severity in SEVERE]


def test_a_rate_is_judged_by_no_other_optimizer(fashion):
    settings = {"lr": 1.0, "method": {"kind": "custom", "path": "torch.optim.Adadelta"}}
    config = settled(fashion, optimizer=settings)
    found = examined(config, fashion)["settings.lr"]
    assert found.severity == "fine"
    assert "torch.optim.Adadelta" in found.evidence
    assert _usual_learning_rate(NO_FOLDER, config) is None


def test_trained_weights_have_a_usual_rate_of_their_own(fashion):
    config = settled(fashion)
    tuned = replace(config, init=replace(config.init, folder="runs/flowers"))
    assert _usual_learning_rate(NO_FOLDER, tuned) == pytest.approx(0.3 * _usual_learning_rate(NO_FOLDER, config))


@pytest.mark.parametrize(
    ("name", "settings", "code", "severity"),
    [
        ("default", {"optimizer": {"lr": 0.03}}, "lr", "hint"),
        ("default", {"optimizer": {"lr": 0.12}}, "lr", "warning"),
        ("default", {"optimizer": {"lr": 0.6}}, "lr", "fatal"),
        ("default", {"optimizer": {"lr": 4e-4}}, "lr", "hint"),
        ("default", {"optimizer": {"lr": 1e-4}}, "lr", "warning"),
        ("default", {"optimizer": {"lr": 1e-7}}, "lr", "fatal"),
        ("default", {"optimizer": {"warmup": 1_600}}, "warmup", "warning"),
        ("default", {"optimizer": {"warmup": 4_000}}, "warmup", "warning"),
        ("default", {"optimizer": {"betas": [0.99, 0.9]}}, "optimizer", "warning"),
        ("default", {"optimizer": {"eps": 1e-3}}, "optimizer", "warning"),
        ("default", {"optimizer": {"weight_decay": 2.0}}, "optimizer", "warning"),
        ("default", {"training": {"clip": 0.0}}, "clip", "warning"),
        ("default", {"training": {"batch": 10_000, "images": 10**7}, "optimizer": {"lr": 6e-2}}, "batch", "hint"),
        ("default", {"training": {"batch": 2}, "optimizer": {"lr": 6e-4}}, "batch", "hint"),
        ("default", {"ema": "power:width=0.28"}, "ema", "warning"),
        ("default", {"ema": "fixed:decay_max=0.5"}, "ema", "warning"),
        ("default", {"training": {"images": 9_600}}, "length", "warning"),
        ("default", {"training": {"images": 9_000 * 2_100}}, "length", "warning"),
        ("default", {"guidance": 3.0, "label_dropout": 0.0}, "guidance", "warning"),
        ("default", {"label_dropout": 1.0}, "guidance", "warning"),
        ("default", {"guidance": 20.0}, "guidance", "hint"),
        ("default", {"sampler": {"steps": 4}}, "sampler", "hint"),
        ("ddpm", {"sampler": {"kind": "ddpm", "steps": 20}}, "sampler", "hint"),
        ("default", {"preview": {"every": 5}}, "asides", "warning"),
        ("default", {"evaluate": {"every": 10}}, "asides", "warning"),
        ("default", {"evaluate": {"images": 4}}, "held_out", "hint"),
        ("default", {"checkpoint": {"every": -1}}, "checkpoints", "warning"),
        ("ddpm", {"diffusion": {"schedule": "linear:beta_end=0.005"}}, "terminal_snr", "warning"),
        ("ddpm", {"diffusion": {"schedule": "linear:beta_end=0.001"}}, "terminal_snr", "fatal"),
        ("default", {"diffusion": {"path": "ve", "schedule": "lognormal"}}, "input_scale", "warning"),
        ("default", {"network": "unet:channels=32/32/32/32,attention=0/0/0/0"}, "network", "fatal"),
    ],
)
def test_a_planted_fault_gives_its_finding_and_no_other(fashion, name, settings, code, severity):
    """The confusion table: one row a fault."""
    network = settings.get("network")
    sound = {**settings, "network": NETWORK} if network else settings
    length = {"images": 200_000 if name == "default" else 2_000_000}
    config = settled(fashion, name, **{**sound, "training": {**length, **sound.get("training", {})}})
    config = update(config, {"network": network}, "") if network else config
    findings = examined(config, fashion)
    found = {c: f.severity for c, f in findings.items() if f.severity in SEVERE or c == f"settings.{code}"}
    assert found == {f"settings.{code}": severity}, [str(f) for f in findings.values() if f.severity != "fine"]
    assert findings[f"settings.{code}"].remedy


def few(images):
    """The first images of a set, none held out."""
    first = images.train.subset(slice(12))
    empty = first.subset(slice(0))
    return Dataset(images.settings, first, empty, images.report)


def test_small_sets_are_measured_by_themselves(fashion):
    small = few(fashion)
    findings = examined(settled(small, training={"images": 100_000}), small)
    assert severe(findings) == {"settings.length": "warning"}  # each is seen 8,000 times
    assert findings["settings.length"].facts["epochs"] == pytest.approx(100_032 / 12)
    assert findings["settings.batch"].severity == "hint"
    assert findings["settings.held_out"].severity == "fine"  # of so few none can be spared


def test_labels_beyond_the_classes_are_fatal(fashion):
    config = settled(fashion)
    assert severe(examined(replace(config, classes=config.classes[:4]), fashion)) == {"settings.labels": "fatal"}


def test_images_that_are_not_taken_to_both_sides_of_zero_are_fatal(fashion, monkeypatch):
    augment = unfog.data.augmentation.Augment()
    assert _check_range(_evenly_spread_pixels(fashion.train), augment).severity == "fine"
    for wrong in (lambda p: p.float() / 255, lambda p: p.float(), lambda p: p.double() / 127.5 - 1):
        monkeypatch.setattr(StoredValues, "to_model", lambda self, stored, wrong=wrong: wrong(stored))
        assert _check_range(_evenly_spread_pixels(fashion.train), augment).severity == "fatal"


def test_timesteps_that_leave_out_zero_are_fatal(monkeypatch):
    diffusion = Diffusion(schedule=Cosine(steps=250))
    found = _check_timesteps(diffusion)
    assert found.severity == "fine"
    assert (found.facts["from"], found.facts["to"], found.facts["met"]) == (0, 249, 250)
    quantile = Cosine.quantile
    monkeypatch.setattr(Cosine, "quantile", lambda self, logsnr: quantile(self, logsnr) + 1 / self.steps)  # 1 … T
    assert _check_timesteps(diffusion).severity == "fatal"
    monkeypatch.setattr(Cosine, "quantile", lambda self, logsnr: quantile(self, logsnr) + 0.5 / self.steps)
    assert "fractions" in _check_timesteps(diffusion).evidence


def test_pace_tells_costs_in_time(fashion):
    config = update(settled(fashion), {"checkpoint": {"every": 1_000}}, "")
    slow = examined(config, fashion, seconds_per_step=5.0)
    assert slow["settings.checkpoints"].severity == "warning"  # 1,000 steps of 5 s are more than an hour
    assert slow["settings.asides"].facts["seconds"] > 60
    assert examined(config, fashion, seconds_per_step=0.1)["settings.checkpoints"].severity == "fine"


def test_passes_are_counted_as_they_are_made(fashion):
    config = settled(fashion, training={"images": 64_000}, sampler={"kind": "heun", "steps": 10}, guidance=2.0)
    config = update(config, {"preview": {"every": 100, "images": 3}, "evaluate": {"every": 250, "images": 50}}, "")
    counted = forward_passes(config, held_out=20)
    # Before the first step, after 100 … 900, and after the last; two calls a step for Heun, but for the first and the
    # last, and guidance at 6 levels.
    assert counted["preview"] == 11 * 3 * (18 + 12)
    assert counted["evaluate"] == 5 * 20 * 8
    assert counted["training"] == 3 * 64_000
    plain = forward_passes(replace(config, guidance=1.0), held_out=20)
    assert plain["preview"] == 11 * 3 * 18
    everywhere = forward_passes(replace(config, guidance_interval=(0.0, 1.0)), held_out=20)
    assert everywhere["preview"] == 2 * plain["preview"]
    assert counted["metrics"] == 0
    drawing = update(config, {"evaluate": {"metrics": ["kid"], "samples": 500, "metrics_every": 300}}, "")
    # After 300, 600, 900 and the last.
    assert forward_passes(drawing, held_out=20)["metrics"] == 4 * 500 * (18 + 12)
    within = update(config, {"evaluate": {"metrics": ["kid"], "share": 0.1}}, "")
    assert forward_passes(within, held_out=20)["metrics"] == pytest.approx(0.1 * 3 * 64_000)


def test_metrics_that_take_longer_than_training_are_told(fashion):
    evaluate = {"metrics": ["kid"], "samples": 10_000, "metrics_every": 500}
    found = examined(settled(fashion, evaluate=evaluate), fashion)["settings.asides"]
    assert found.severity == "warning"
    assert "generating for metrics" in found.evidence
    assert "--evaluate.samples" in found.remedy


def test_no_room_for_checkpoints_is_fatal(fashion, monkeypatch):
    monkeypatch.setattr(machine, "free_bytes", lambda folder: 10_000)
    assert severe(examined(settled(fashion), fashion)) == {"settings.disk": "fatal"}


def test_the_disk_is_judged_as_the_run_will(fashion, tmp_path, monkeypatch):
    """No room by the doctor's sum is no room by that of the run, and enough for one is enough for the other."""
    config = settled(fashion)
    state, steps = build_state(config, CPU), config.training.images // config.training.batch
    parameters = sum(p.numel() for p in state.model.parameters())
    room = disk_space_needed(parameters, config.checkpoint, steps, config.ema_snapshots)
    for free, severity in ((room.minimum - 1, "fatal"), (room.minimum, "warning"), (room.maximum + 1, "fine")):
        for module in (machine, disk):
            monkeypatch.setattr(module, "free_bytes", lambda folder: free)  # noqa: B023
        assert machine._check_disk(config, parameters, tmp_path).severity == severity
        if severity == "fatal":
            with pytest.raises(RequestError, match=machine.format_bytes(2 * room.checkpoint)):
                disk.check_disk_room(tmp_path, state, config.checkpoint, steps, config.ema_snapshots)
        else:
            line = disk.check_disk_room(tmp_path, state, config.checkpoint, steps, config.ema_snapshots)
            assert ("may have to wait" in line) == (severity == "warning")


@pytest.mark.parametrize(
    ("precision", "seconds", "severity", "remedy"),
    [
        ("bf16", {torch.bfloat16: 0.5}, "fine", ""),
        ("bf16", {torch.bfloat16: 3.0}, "warning", "--precision fp32"),
        ("fp16", {torch.float16: 60.0, torch.bfloat16: 0.5}, "warning", "--precision bf16"),
        ("fp16", {torch.float16: 60.0, torch.bfloat16: 3.0}, "warning", "--precision fp32"),
        ("fp16", {torch.float16: 0.5, torch.bfloat16: 0.5}, "hint", "--precision bf16"),
        ("fp32", {}, "fine", ""),
    ],
)
def test_precision_is_judged_by_what_it_costs_here(fashion, monkeypatch, precision, seconds, severity, remedy):
    monkeypatch.setattr(machine, "_multiply_seconds", lambda dtype, device: seconds.get(dtype, 1.0))
    found = _check_precision(settled(fashion, training={"precision": precision}), CPU)
    assert found.severity == severity
    assert remedy in found.remedy


def test_products_are_really_measured():
    assert 0 < machine._multiply_seconds(torch.float32, CPU) < 60
    with pytest.raises(RuntimeError):
        machine._multiply_seconds(torch.uint16, CPU)


def test_milestones_are_kept_besides_the_newest():
    few, more = (disk_space_needed(100, Checkpoint(keep=3, milestones=steps), 1000) for steps in (0, 50))
    assert more.checkpoints == few.checkpoints + 20


def test_a_rate_between_the_two_rules_is_not_high():
    by_root = default_learning_rate(10**6, 512, UNet())
    config = update(Config(), {"training": {"batch": 512, "images": 512_000}, "optimizer": {"lr": 2.5 * by_root}}, "")
    assert 2.5 * by_root < rate_checks._linear_learning_rate(10**6, 512, UNet()) < 3 * by_root
    for factor, severity in ((1, "fine"), (3, "fine"), (3.5, "hint")):  # times what is below the linear rule
        lr = factor * 2.5 * by_root
        given = replace(config, optimizer=replace(config.optimizer, lr=lr))
        assert rate_checks._check_learning_rate(given, 10**6).severity == severity


@pytest.mark.parametrize(("millions", "batch"), [("tiny", 64), ("small", 256), ("small", 16)])
def test_the_usual_learning_rate_is_what_is_chosen(fashion, millions, batch):
    config = settled(fashion, network=millions, training={"batch": batch})
    parameters = sum(p.numel() for p in build_network(config).parameters())
    assert default_learning_rate(parameters, batch, UNet(), Muon()) == pytest.approx(config.optimizer.lr, rel=0.03)
    by_adamw = settled(fashion, network=millions, training={"batch": batch}, optimizer={"method": "adamw"})
    assert default_learning_rate(parameters, batch, UNet()) == pytest.approx(by_adamw.optimizer.lr, rel=0.03)
    assert config.optimizer.lr == pytest.approx(2 * by_adamw.optimizer.lr, rel=0.03)


@pytest.mark.parametrize("profile", [PowerEma(), PowerEma(0.2), FixedEma(), FixedEma(0.99)])
def test_shares_of_the_average_are_those_of_the_recursion(profile):
    """Against the average itself, of weights that are 1 up to a step and 0 from then on; also where it is a sum."""
    for steps, until in ((50, 5), (6_000, 600), (20_000, 15_000)):
        value = 0.0
        for n in range(1, steps + 1):
            decay = profile.decay(n)
            value = decay * value + (1 - decay) * (n <= until)
        initial = np.prod([profile.decay(n) for n in range(1, steps + 1)])  # of weight 1 before the first update
        assert _ema_share_before(profile, until, steps) == pytest.approx(value + initial, rel=0.01, abs=1e-12)
        half = _ema_half_window(profile, steps)
        assert (
            _ema_share_before(profile, steps - half, steps)
            <= 0.5
            <= _ema_share_before(profile, steps - half + 1, steps)
        )


DIFFUSIONS = {
    "default": preset("default").diffusion,
    "ddpm": preset("ddpm").diffusion,
    "eps, linear, min-snr": Diffusion(schedule=Linear(), target=Eps(), weighting=MinSnr()),
    "eps, linear, 1/snr": Diffusion(schedule=Linear(), target=Eps(), weighting=InverseSnr()),
    "x0, snr": Diffusion(schedule=Cosine(), target=X0(), weighting=Snr()),
    "v, zero terminal": Diffusion(schedule=Linear(zero_terminal=True), target=V()),
    "v, continuous": Diffusion(schedule=Cosine(steps=0)),
    "edm": Diffusion(VE(), LogNormal(), EdmF(), Edm(), conditioning="logsnr", scale_input=True),
    "flow, uniform": Diffusion(Flow(), FlowUniform(), FlowVelocity()),
}


@contextmanager
def limits(steps):
    """So many steps, and no limit of time, so that a slow machine changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overfitting, "_MOST_STEPS", steps)
        patch.setattr(overfitting, "_MOST_SECONDS", 1e6)
        yield


def overfit(fashion, diffusion, lr=None, spoil=lambda network: None, steps=600, stop=lambda: False, microbatch=0):
    config = replace(settled(fashion, training={"microbatch": microbatch}), diffusion=diffusion)
    if lr is not None:
        config = replace(config, optimizer=replace(config.optimizer, lr=lr))
    state = build_state(config, CPU)
    spoil(state.model)
    torch.manual_seed(0)
    images = fashion.train.subset(slice(4000))
    images = replace(images, pixels=images.pixels[..., ::2, ::2])
    with limits(steps):
        return overfit_one_batch(config, state, images, stop)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("default", "edm") else pytest.mark.exhaustive) for name in DIFFUSIONS],
)
def test_every_diffusion_learns_a_batch_by_heart(fashion, name):
    found = overfit(fashion, DIFFUSIONS[name])
    assert found.severity == "fine", str(found)
    assert found.facts["loss_to_blind"] < LEARNED
    assert found.facts["loss_to_first"] < STUCK / 2
    assert found.figures[0].image is not None
    assert found.figures[1].svg


def cut(network):
    """The gradient does not arrive."""
    forward = network.forward
    bias = network.conv_out.bias
    network.forward = lambda *inputs: forward(*inputs).detach() + 0 * bias.sum()


def ignoring(which):
    """One of the inputs is not looked at."""

    def spoil(network):
        forward = network.forward

        def deaf(x, c_noise, label=None):
            inputs = {"image": x, "level": c_noise, "label": label}
            inputs[which] = None if which == "label" else torch.zeros_like(inputs[which])
            return forward(*inputs.values())

        network.forward = deaf

    return spoil


@pytest.mark.parametrize("name", ["default", "ddpm", "edm"])
def test_what_cannot_learn_is_found(fashion, name):
    for found in (
        overfit(fashion, DIFFUSIONS[name], 0.0, steps=22),
        overfit(fashion, DIFFUSIONS[name], None, cut, 22),
    ):
        assert found.severity == "fatal"
        assert found.facts["loss_to_first"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("which", ["image", "level", "label"])
def test_an_input_that_is_not_looked_at_is_found(fashion, which):
    found = overfit(fashion, DIFFUSIONS["default"], 0.01, ignoring(which), 12)
    assert found.severity == "fatal"
    assert which in found.evidence
    assert not {"image", "level", "label"} - {which} & set(found.evidence.split("depend on")[1].split())


def test_a_loss_that_is_not_finite_is_found(fashion):
    def explode(network):
        forward = network.forward
        network.forward = lambda *inputs: forward(*inputs) + float("nan")

    found = overfit(fashion, DIFFUSIONS["default"], None, explode, steps=3)
    assert found.severity == "fatal"
    assert "3 steps were skipped" in found.evidence
    assert json.loads(json.dumps(dict(found.facts), allow_nan=False))["loss_to_first"] is None


def test_a_loss_that_rises_asks_for_a_lower_rate(fashion):
    found = overfit(fashion, DIFFUSIONS["ddpm"], 1.0, steps=25)
    assert found.severity == "fatal"
    assert "rose" in found.evidence
    assert found.remedy == "a lower --lr"


def test_fewer_images_than_eight_are_learned_at_several_levels(fashion):
    config = settled(fashion)
    one = fashion.train.subset(slice(1))
    one = replace(one, pixels=one.pixels[..., ::2, ::2])
    with limits(25):
        found = overfit_one_batch(config, build_state(config, CPU), one)
    assert found.facts["steps"] == 25
    assert found.facts["loss_to_first"] < STUCK


def test_a_lesson_fits_where_the_run_does(fashion):
    """The network never sees more images at a time than the run gives it, also when it is questioned and drawn."""
    sizes = []

    def spy(network):
        forward = network.forward

        def counted(x, *rest):
            sizes.append(len(x))
            return forward(x, *rest)

        network.forward = counted

    whole = overfit(fashion, DIFFUSIONS["default"], 0.01, spy, 12)
    assert set(sizes) == {8}
    sizes.clear()
    parts = overfit(fashion, DIFFUSIONS["default"], 0.01, spy, 12, microbatch=3)
    assert set(sizes) == {3, 2}
    assert parts.facts["loss_to_first"] == pytest.approx(whole.facts["loss_to_first"], rel=0.1)


def test_what_each_pixel_alone_tells_is_what_least_squares_makes_of_it(fashion):
    """A pixel that is the same in all eight images needs no guessing, and counts as known."""
    objective = Objective(DIFFUSIONS["default"])
    pixels = np.full((8, 1, 16, 16), 255, np.uint8)
    pixels[:, :, 6:10, 6:10] = np.random.default_rng(0).integers(0, 256, (8, 1, 4, 4))
    maps = (CPU, BYTES.to_model, ImageFormat(1, 16, 16).to_view)
    of_white = OverfitBatch.of(replace(fashion.train, pixels=pixels, columns={}), objective, *maps)
    alone = OverfitBatch.of(replace(fashion.train, pixels=pixels[:, :, 6:10, 6:10], columns={}), objective, *maps)
    alone.noise = of_white.noise[:, :, 6:10, 6:10]
    assert torch.allclose(of_white.pixelwise_loss(), alone.pixelwise_loss() * (4 / 16) ** 2, rtol=1e-4)


def test_a_slow_learner_is_no_fault(fashion):
    found = overfit(fashion, DIFFUSIONS["default"], 2e-4, steps=22)
    assert found.severity == "hint"


def test_leaving_a_lesson_leaves_at_once(fashion):
    with pytest.raises(Interrupted):
        overfit(fashion, DIFFUSIONS["default"], stop=lambda: True)


def test_rates_scale_by_both_rules():
    assert rate_checks._linear_learning_rate(10**6, 128, UNet()) == pytest.approx(6e-3)
    assert default_learning_rate(10**6, 256, UNet()) == pytest.approx(6e-3)
    assert rate_checks._linear_learning_rate(10**6, 2048, UNet()) == pytest.approx(3e-3 * 8 * 2)


@pytest.mark.parametrize("timesteps", [4, 10, 100, 1000])
@pytest.mark.parametrize(("kind", "steps"), [("dpmpp", 3), ("ddpm", 3), ("ddpm", 4)])
def test_more_sampling_steps_are_advised_that_the_schedule_has(timesteps, kind, steps):
    changes = {"diffusion": {"schedule": f"cosine:steps={timesteps}"}, "sampler": {"kind": kind, "steps": steps}}
    config = update(preset("ddpm"), changes, "")
    remedy = _check_sampler(config).remedy
    count, karras = int(re.search(r"--sampler.steps (\d+)", remedy)[1]), "grid karras" in remedy
    assert count > steps
    resolve_sampler(config, kind, count, "karras" if karras else None)  # which refuses what cannot be drawn
    assert karras == (count > timesteps)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"guidance": 12.0}, "unfog sample RUN --guidance 1.5"),
        ({"sampler": {"steps": 2}}, "unfog sample RUN --steps 20"),
        (
            {"sampler": {"kind": "ddpm", "steps": 20}},
            "unfog sample RUN --sampler dpmpp, or --steps 250",
        ),
        ({"label_dropout": 0.9}, ""),
        ({}, ""),
    ],
)
def test_settings_that_spoil_samples_of_a_run_are_mended_when_it_samples(changes, remedy):
    config = update(replace(preset("default"), classes=("a", "b")), changes, "")
    found = check_sampling(config, lambda verb, flags: f"unfog {verb} RUN {flags}")
    assert [one.remedy for one in found] == [remedy] * bool(remedy)
    assert all(one.severity == "hint" for one in found)
