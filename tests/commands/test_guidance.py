"""Guidance by a weaker network and within an interval, labels like a data set's, levels tuned to a run."""

import importlib
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import unfog
from command import exit_status
from conftest import TRANSFORMER, few_images
from gaussians import gaussian_denoiser
from unfog.config.schema import Config
from unfog.config.toml import from_toml, to_toml
from unfog.diffusion.denoiser import Autoguided, Within
from unfog.diffusion.noise import VE, Cosine, LogNormal, noise_levels
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError, RunError
from unfog.inference.loaded_run import LoadedRun
from unfog.inference.run import Run
from unfog.inference.tune import (  # the search runs on errors of known shape
    _BUILT_IN,
    _CallCounter,
    _GridError,
    _levels_are_valid,
    _search_levels,
)
from unfog.pipeline.generate import GenerationSettings, cost_per_sample, generate_images, proportional_labels
from unfog.process.run_folder import RunFolder
from unfog.reporting.records import read_events
from unfog.runs.resume import omit_tuned_settings
from unfog.training import precision
from unfog.training.precision import drawing_precision
from unfog.values.columns import CLASS
from unfog.values.conditions import NO_CONDITIONS, Conditions
from unfog.values.image_format import BYTES

pytestmark = pytest.mark.slow

SETTINGS = {
    "network": TRANSFORMER,
    "device": "cpu",
    "precision": "fp32",
    "batch": 16,
    "preview": {"every": -1, "images": 4},
    "evaluate": {"every": -1, "images": 8, "levels": 2},
    "checkpoint": {"every": 20, "keep": 9},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "fashion"
    return unfog.train(few_images(), out=out, steps=40, lr=6e-3, size=16, **SETTINGS)


def gaussian(mean: float, std: float) -> Callable[..., Tensor]:
    return partial(gaussian_denoiser, mean, std, VE())


def test_autoguidance_is_linear_in_its_scale():
    x, logsnr = torch.randn(4, 1, 3, 3), torch.linspace(-6, 6, 4)
    good, weak = gaussian(0.2, 0.3), gaussian(-0.1, 0.9)
    at = {scale: Autoguided(good, weak, scale)(x, logsnr, NO_CONDITIONS) for scale in (0.0, 1.0, 3.0)}
    assert torch.equal(at[0.0], weak(x, logsnr))
    torch.testing.assert_close(at[1.0], good(x, logsnr))
    torch.testing.assert_close(at[3.0], 3 * good(x, logsnr) - 2 * weak(x, logsnr))
    torch.testing.assert_close(Autoguided(good, good, 7.0)(x, logsnr, NO_CONDITIONS), good(x, logsnr))


def test_autoguidance_narrows_a_gaussian_as_it_should():
    """Scores of Gaussians of one mean are -(x - mean) / variance, so that guided ones are those of a narrower one.

    With precisions p and p_w at a level, the guided score has p_w + scale (p - p_w) there: the ODE's map from noise to
    picture is then d ln |x - mean| / d sigma = sigma (p_w + scale (p - p_w)), which has a closed integral.
    """
    std, wider, scale, mean = 0.3, 0.5, 2.0, 0.1
    guided = Autoguided(gaussian(mean, std), gaussian(mean, wider), scale)
    sampler = Sampler("unipc", 400, "logsnr", clip=False)
    noise = torch.randn(64, 1, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = sampler(lambda x, logsnr: guided(x, logsnr, NO_CONDITIONS), VE(), LogNormal(), lambda: noise)
    first = 80.0

    def shrunk(deviation: float) -> float:  # exp of the integral of sigma / (deviation^2 + sigma^2)
        return deviation / math.sqrt(deviation**2 + first**2)

    factor = shrunk(std) ** scale * shrunk(wider) ** (1 - scale)
    torch.testing.assert_close(x - mean, factor * (first * noise - mean), rtol=2e-3, atol=1e-4)
    assert factor * first < std  # narrower than the data


def test_a_difference_is_kept_for_the_steps_between_calls_of_the_guide():
    asked = []

    def weak(x: Tensor, logsnr: Tensor, conditions: Conditions) -> Tensor:
        asked.append(float(logsnr[0]))
        return gaussian(-0.1, 0.9)(x, logsnr)

    x, good = torch.randn(2, 1, 3, 3), gaussian(0.2, 0.3)
    guided = Autoguided(good, weak, 2.0, every=3)
    levels = [-3.0, -2.0, -1.0, 0.0, 1.0, 0.5, 2.0, -3.0]
    answers = [guided(x, torch.full((2,), level), None) for level in levels]
    # Every third call; and where noise rises again, as in an edit or in a new walk.
    assert asked == [-3.0, 0.0, 0.5, -3.0]
    for level, answer, of in zip(levels, answers, [-3.0, -3.0, -3.0, 0.0, 0.0, 0.5, 0.5, -3.0], strict=True):
        then = torch.full((2,), of)
        difference = good(x, then) - gaussian(-0.1, 0.9)(x, then)
        torch.testing.assert_close(answer, good(x, torch.full((2,), level)) + difference)


def test_the_interval_is_where_it_says_and_costs_nothing_elsewhere():
    calls = {"guided": 0, "plain": 0}

    def count(name: str, value: float, x: Tensor, logsnr: Tensor, conditions: Conditions) -> Tensor:
        calls[name] += 1
        return torch.full_like(x, value)

    within = Within(partial(count, "guided", 1.0), partial(count, "plain", 0.0), (0.25, 0.6))
    share = torch.tensor([0.1, 0.2499, 0.2501, 0.5, 0.5999, 0.6001, 1.0], dtype=torch.float64)
    logsnr = 2 * ((1 - share) / share).log()
    x = torch.zeros(7, 1, 2, 2, dtype=torch.float64)
    assert within(x, logsnr, NO_CONDITIONS)[:, 0, 0, 0].tolist() == [0, 0, 1, 1, 1, 0, 0]
    calls.update(guided=0, plain=0)
    within(x[:2], logsnr[:2], None)
    assert calls == {"guided": 0, "plain": 1}
    within(x[2:5], logsnr[2:5], None)
    assert calls == {"guided": 1, "plain": 1}


def test_auto_guides_by_the_own_average_of_an_earlier_step(run, tmp_path, monkeypatch, capsys):
    with pytest.raises(RequestError, match="no EMA snapshots"):
        run.sample(2, guide="auto")  # too short a run to keep them
    own = unfog.train(
        few_images(), out=tmp_path / "own", steps=40, lr=6e-3, size=16, ema_snapshots={"every": 4}, **SETTINGS
    )
    asked = {"steps": 4, "label": 1}
    guided = own.sample(4, guide="auto", **asked)
    earlier = LoadedRun(own.path, step=12, ema=0.1)  # 30% of 40
    assert np.array_equal(guided, own.sample(4, guide=earlier, guidance=2.0, **asked))
    assert not np.array_equal(guided, own.sample(4, guidance=1.0, **asked))
    with pytest.raises(RequestError, match="does not use a guide"):
        own.sample(2, guide="auto", guidance=1.0)
    # An evaluation measures what is drawn so, and keeps it apart from what is not.
    plain = own.evaluate("sliced", n=10, steps=4, guidance=1.0)
    with_guide = own.evaluate("sliced", n=10, steps=4, guide="auto")
    assert with_guide.drawn["guide"] == "auto"
    assert "guide" not in plain.drawn
    assert with_guide.measured[0].value != plain.measured[0].value
    assert len(list((own.path / "evaluations" / "drawn").iterdir())) == 2
    # A new run without classes is guided so from the beginning; one with classes, or of before, is as it was.
    assert own.config.guide == "auto"
    assert own.config.usual_guide == "none"  # it has classes
    monkeypatch.setattr(type(own.config), "usual_guide", "auto")
    assert np.array_equal(guided, own.sample(4, **asked))
    assert own.evaluate("sliced", n=10, steps=4).drawn["guide"] == "auto"
    for none in ({"guide": "none", "guidance": 1.0}, {"guidance": 1.0}):
        assert np.array_equal(own.sample(4, **none, **asked), own.sample(4, guide="none", guidance=1.0, **asked))
    raw = unfog.load(own.path, weights="raw")
    capsys.readouterr()
    assert np.array_equal(raw.sample(4, **asked), raw.sample(4, guide="none", **asked))
    assert "without the guide" in capsys.readouterr().err
    assert not np.array_equal(raw.sample(4, **asked), raw.sample(4, guide="auto", **asked))  # as the message says
    image = own.sample(1, **asked)[0]
    edit = {"image": image, "strength": 0.5, **asked}  # an edit is not guided unless a guide is asked for
    assert np.array_equal(own.sample(2, **edit), own.sample(2, guide="none", **edit))
    monkeypatch.undo()
    # The contest counts the guide's passes: 12 levels, of which 7 are within shares of noise 0.2 to 0.8.
    monkeypatch.syspath_prepend(str(Path(unfog.__file__).parents[2] / "benchmarks" / "speedrun"))
    calls = importlib.import_module("record").calls_per_image
    assert calls(own, {"steps": 12, "guidance": 1.0}) == 12
    assert calls(own, {"steps": 12, "guide": "auto"}) == 19
    # Nine guided ones of 16 levels, for each batch anew; the samples of all three are kept apart.
    spared = {"steps": 16, "guide": "auto", "guide_every": 3}
    assert calls(own, spared) == 19
    np.testing.assert_allclose(own.sample(4, batch=2, **spared).astype(int), own.sample(4, **spared), atol=1)
    own.evaluate("sliced", n=10, steps=4, guide="auto", guide_every=3)
    assert len(list((own.path / "evaluations" / "drawn").iterdir())) == 3
    with pytest.raises(RequestError, match="guide_every = 3 has no effect without a guide"):
        own.sample(2, guide="none", guide_every=3)
    with pytest.raises(RequestError, match="guide_every = 0"):
        own.sample(2, guide="auto", guide_every=0)


def test_a_guide_is_earlier_than_what_it_guides_and_named_with_it(tmp_path):
    own = unfog.train(
        few_images(), out=tmp_path / "own", steps=40, lr=6e-3, size=16, ema_snapshots={"every": 4}, **SETTINGS
    )
    early = Run(own.path, step=20, ema=0.1)
    asked = {"steps": 12, "label": 1, "guide": "auto"}
    early.sample(2, **asked)
    assert (early.step, early.earlier.step) == (20, 4)  # of the last snapshot in 30% of 20 steps
    assert early.calls == 19  # those of the guide included: 7 levels of 12 are within the interval
    assert early.sampled[1:3] == ("step 20", "EMA of width 0.1")
    with pytest.raises(RequestError, match="step 20 is the checkpoint that samples"):
        early.sample(2, guide=LoadedRun(own.path, step=20, ema=0.1), guidance=2.0)
    assert "guide auto" in early.sampled
    before = early.earlier
    early.sample(2, guide_every=3, **asked)
    assert early.earlier is before  # it is rebuilt from snapshots once
    assert early.calls == 15
    assert "guide every 3" in early.sampled
    assert own.evaluate("sliced", 10, steps=4, guide="auto", guide_every=3).drawn["guide every"] == 3
    own.sample(2, steps=12, guidance=2.0, label=1)
    assert own.calls == 19  # guided by classes, too, asks the network twice at a level


_HEUN = [("heun", 12, 1), ("heun", 20, 3), ("edm", 12, 1)]


@pytest.mark.parametrize(
    ("kind", "steps", "every"), [("dpmpp", 12, 1), ("dpmpp", 16, 3), ("dpmpp", 20, 1), ("dpmpp", 20, 3), *_HEUN]
)
def test_a_sample_costs_its_calls_with_those_of_a_guide_though_two_steps_are_tried(run, kind, steps, every):
    asked, made, config = [], [], run.config
    usual = replace(GenerationSettings.default(config, 2, 2), guidance=2.0, guide_every=every)
    drawing = replace(usual, sampler=replace(usual.sampler, kind=kind, steps=steps))

    def count(x, *_):
        asked.append(len(x))
        return torch.zeros_like(x)

    def measure(work):
        work()
        return sum(asked)

    network = nn.Module()
    network.weight, network.forward = nn.Parameter(torch.zeros(1)), count
    cost = cost_per_sample(network, config, drawing, measure, count)
    generate_images(network, config, drawing, guide=count, calls=made.append)
    assert cost == made[-1]


def test_the_interval_of_a_run(run, monkeypatch):
    asked = {"n": 4, "steps": 6, "batch": 4}
    plain, usual = run.sample(**asked, guidance=1.0), run.sample(**asked, guidance=3.0)
    assert run.config.guidance_interval == (0.2, 0.8)
    assert np.array_equal(run.sample(**asked, guidance=3.0, guidance_interval=(0.2, 0.8)), usual)
    guided = run.sample(**asked, guidance=3.0, guidance_interval=(0.0, 1.0))
    assert not np.array_equal(guided, usual)
    assert not np.array_equal(guided, plain)
    # Six levels of t: 0.999, 0.83, 0.67, 0.5, 0.33, 0.17; none is within this.
    assert np.array_equal(run.sample(**asked, guidance=3.0, guidance_interval=(0.51, 0.6)), plain)
    part = run.sample(**asked, guidance=3.0, guidance_interval=(0.4, 0.6))
    assert not np.array_equal(part, plain)
    assert not np.array_equal(part, guided)
    for interval in ((0.6, 0.4), (0.5, 0.5), (-0.1, 1.0), (0.0, 1.1)):
        with pytest.raises(RequestError, match=r"guidance_interval = .* 0.2 0.75 omits"):
            run.sample(**asked, guidance_interval=interval)
    # Guidance by classes needs a network that has seen images without one.
    for dropout, remedy in ((0.1, "--guidance 2"), (0.0, "a --guide")):
        monkeypatch.setattr(run, "config", replace(run.config, label_dropout=dropout))
        with pytest.raises(RequestError, match=f"guidance_interval has no effect.*give {remedy}"):
            run.sample(**asked, guidance=1.0, guidance_interval=(0.2, 0.8))


def test_a_younger_checkpoint_guides(run):
    asked = {"n": 4, "steps": 4, "batch": 4}
    plain = run.sample(**asked, guidance=1.0)
    guided = run.sample(**asked, guidance=2.0, guide=20)
    assert not np.array_equal(guided, plain)
    assert not np.array_equal(guided, run.sample(**asked, guidance=2.0))
    assert np.array_equal(guided, run.sample(**asked, guidance=2.0, guide=f"{run.path}:20"))
    younger = unfog.load(run.path)
    younger = type(younger)(run.path, step=20)
    assert np.array_equal(guided, run.sample(**asked, guidance=2.0, guide=younger))
    # Nothing of it at scale 0 but the guide itself.
    whole = run.sample(**asked, guidance=0.0, guide=20, guidance_interval=(0.0, 1.0))
    assert np.array_equal(whole, younger.sample(**asked, guidance=1.0))


def test_a_guide_that_is_none_is_refused(run, tmp_path):
    with pytest.raises(RequestError, match="step 7; there is 0, 20, 40"):
        run.sample(1, guidance=2.0, guide=7)
    with pytest.raises(RequestError, match="step 40 is the checkpoint that samples"):
        run.sample(1, guidance=2.0, guide=str(run.path))
    with pytest.raises(RequestError, match="guidance = 1 does not use a guide"):
        run.sample(1, guidance=1.0, guide=20)
    other = unfog.train(few_images(), out=tmp_path / "other", steps=2, size=12, **SETTINGS)
    with pytest.raises(RequestError, match=r"another image size than this run \(12, not 16\)"):
        run.sample(1, guidance=2.0, guide=other.path)


def test_bf16_is_of_the_networks_alone(run, tmp_path):
    asked = {"n": 4, "steps": 4, "batch": 4, "guidance": 1.0}
    seen = []

    def note(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """What a network is given, and what its last layer gives."""
        seen.append((inputs[0].dtype, output.dtype))

    plain = run.sample(**asked)
    hook = run.network.patch_out.register_forward_hook(note)
    half = run.sample(**asked, precision="bf16")
    assert {after for _, after in seen} == {torch.bfloat16}
    hook.remove()
    difference = np.abs(half.astype(int) - plain)
    assert difference.any()
    assert difference.mean() < 1, "of 255"
    assert "bf16" in run.prepare(**asked, precision="bf16").caption
    assert np.array_equal(run.sample(**asked), plain), "and nothing of it stays behind"
    led = {"guidance": 2.0, "guide": 20}
    assert not np.array_equal(run.sample(**asked | led, precision="bf16"), run.sample(**asked | led))
    with pytest.raises(RequestError, match=r"precision = 'fp8'"):
        run.sample(**asked, precision="fp8")
    flags = ("-n", "4", "--steps", "4", "--batch", "4", "--guidance", "1", "--precision", "bf16")
    assert exit_status("sample", str(run.path), *flags, "--out", str(tmp_path / "a")) == 0
    (drawn,) = (tmp_path / "a").glob("000003*.png")  # the name ends with the class
    assert np.array_equal(np.asarray(Image.open(drawn)), half[3, :, :, 0])
    evaluated = run.evaluate("sliced", 10, steps=2, precision="bf16")
    assert evaluated.drawn["precision"] == "bf16"
    assert evaluated["sliced"].value != run.evaluate("sliced", 10, steps=2)["sliced"].value


@pytest.mark.parametrize(
    ("device", "native", "trained", "drawn"),
    [
        ("cpu", True, "bf16", "fp32"),
        ("mps", True, "fp32", "fp32"),
        ("cuda", True, "fp32", "bf16"),
        ("cuda", False, "fp16", "fp16"),
        ("cuda", False, "bf16", "fp32"),
    ],
)
def test_drawing_is_in_16_bits_where_a_gpu_has_them(device, native, trained, drawn, monkeypatch):
    """In fp16 only what has learned in it: other activations may be too large for it."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native)
    assert drawing_precision("auto", torch.device(device), trained) == drawn
    assert drawing_precision("fp32", torch.device(device), trained) == "fp32"
    monkeypatch.setattr(precision, "_HALF_DRAWING_ON", ())
    assert drawing_precision("auto", torch.device(device), trained) == "fp32"


def test_previews_and_samples_are_drawn_in_the_same_precision(run, monkeypatch):
    """So that a preview equals the output of `unfog sample`; the guide is of it too."""
    monkeypatch.setattr(precision, "_HALF_DRAWING_ON", ("cpu",))
    monkeypatch.setattr(precision, "gpu_has_bf16", lambda device: True)
    preview = generate_images(run.network, run.config, GenerationSettings.default(run.config, 4, 4))
    guidance = {"guidance": run.config.usual_guidance, "guide": "none"}
    assert np.array_equal(run.sample(4, batch=4, **guidance), preview)
    assert np.array_equal(run.sample(4, batch=4, precision="bf16", **guidance), preview)
    assert not np.array_equal(run.sample(4, batch=4, precision="fp32", **guidance), preview)
    guided = run.prepare(4, guide=20, guidance=2.0)
    assert guided.guide.dtype == torch.bfloat16
    assert guided.generation.precision == "bf16"


def test_flags_of_guidance(run, tmp_path, capsys):
    flags = ("-n", 2, "--steps", 4, "--guidance", 2, "--guidance-interval", 0.1, 0.9, "--guide-checkpoint", 20)
    assert exit_status("sample", str(run.path), *map(str, flags), "--out", str(tmp_path / "a")) == 0
    expected = run.sample(2, steps=4, guidance=2.0, guidance_interval=(0.1, 0.9), guide=20)
    for i in range(2):
        assert np.array_equal(
            np.asarray(Image.open(next((tmp_path / "a").glob(f"{i:06d}*.png")))), expected[i, :, :, 0]
        )
    assert exit_status("sample", run.path, "--guide", run.path, "--guide-checkpoint", "20") == 2
    assert exit_status("sample", run.path, "--guidance-interval", "0.9", "0.1") == 2
    said = capsys.readouterr().err
    assert "both name a guide" in said
    assert "0.2 0.75 omits" in said
    exit_status("sample", str(run.path), "-n", "2", "--sampler", "adaptive", "--out", str(tmp_path / "b"))
    assert re.search(r"adaptive took up to \d+ network calls", capsys.readouterr().err)


def test_old_settings_have_no_interval():
    text = to_toml(Config(source="x", guidance=2.0))
    new = ("guidance_interval", "order", "tuned", "tolerance", "churn")
    old = "\n".join(line for line in text.splitlines() if not line.startswith(new))
    assert "churn" not in old
    assert from_toml(old, Config()) == Config(source="x", guidance=2.0)
    assert from_toml(text, Config()) == Config(source="x", guidance=2.0)


def test_labels_like_a_data_set():
    data = [0] * 50 + [1] * 30 + [3] * 20
    labels = proportional_labels(data, 1000)
    shares = np.bincount(labels, minlength=4) / 1000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0, 0.2], atol=0.004)
    # A picture's label does not depend on how many there are.
    assert proportional_labels(data, 17) == labels[:17]
    # Every stretch has them, so that a batch has.
    for first in range(0, 1000, 50):
        assert abs(labels[first : first + 50].count(0) - 25) <= 2
    assert proportional_labels(np.array([5]), 3) == (5, 5, 5)
    assert proportional_labels(None, 3) == ()
    many = proportional_labels(np.repeat(np.arange(4), [60, 25, 10, 5]), 5000)
    for count in (100, 777, 5000):
        assert np.abs(np.bincount(many[:count]) - count * np.array([0.6, 0.25, 0.1, 0.05])).max() < 3
    for nothing in ([], np.zeros((2, 2), dtype=int)):
        with pytest.raises(RequestError, match="need one that has labels"):
            proportional_labels(nothing, 3)


def test_labels_like_a_data_set_can_be_drawn(run):
    labels = proportional_labels([0, 0, 0, 1], 8)
    drawn = generate_images(
        run.network, run.config, GenerationSettings(8, Sampler(steps=2), ((CLASS, labels),), batch=8)
    )
    one_by_one = run.sample(8, steps=2, label=labels, guidance=1.0, batch=8)
    assert np.array_equal(drawn, one_by_one)


def test_levels_are_moved_to_where_the_error_is_least():
    """An error with a known minimum: the squared distance from some levels, which are not those of our grid."""
    wanted = torch.tensor([-8.0, -3.0, -2.5, -1.0, 2.0, 3.0, 3.5, 8.0], dtype=torch.float64)
    tried = []

    def error(logsnr: Tensor) -> float:
        assert _levels_are_valid(logsnr, LogNormal())
        tried.append(logsnr)
        return float((logsnr - wanted).square().sum())

    start = torch.linspace(-8.7, 10.0, 8, dtype=torch.float64)
    found = _search_levels(start, error, LogNormal(), 400)
    assert (found - wanted).abs().max() < 0.15
    assert len(tried) <= 400
    short = _search_levels(start, error, LogNormal(), 30)
    assert error(found) < error(short) < error(start)


def test_levels_are_not_moved_below_what_the_network_was_trained_at():
    start, schedule = torch.linspace(-8, 8, 5, dtype=torch.float64), Cosine()
    found = _search_levels(start, lambda logsnr: float((logsnr[-1] - 12).square()), schedule, 100)
    assert 9 < found[-1] <= schedule.limits()[1] < 12


def test_pure_noise_stays_where_levels_are_moved():
    start = noise_levels(Cosine(zero_terminal=True), 5, "schedule")[:-1]
    wanted = torch.tensor([-math.inf, -4.0, -1.0, 1.0, 6.0], dtype=torch.float64)
    schedule = Cosine(zero_terminal=True)
    found = _search_levels(start, lambda logsnr: float((logsnr - wanted)[1:].square().sum()), schedule, 300)
    assert found[0] == -math.inf
    assert (found - wanted)[1:].abs().max() < 0.15
    # As a share of noise it survives config.toml.
    sampler = Sampler(steps=5, grid="tuned", tuned=tuple((-found / 2).sigmoid().tolist()))
    config = from_toml(to_toml(Config(source="x", sampler=sampler)), Config())
    torch.testing.assert_close(config.sampler.visits(Cosine())[:-1], found)


def test_tune_finds_and_stores_a_grid(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("unfog.inference.tune._MANY_STEPS", 24)
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    found = unfog.tune(copy, steps=3, pictures=6, tries=24)
    assert set(found.errors) == {*_BUILT_IN, "tuned"}
    assert min(found.errors, key=found.errors.get) == found.sampler.grid == "tuned"
    assert found.reference < found.errors["tuned"]
    assert found.table().startswith("levels    error   (RMS difference of pixel values in [-1, 1] from samples in 24")
    assert RunFolder(copy).read_config() == replace(run.config, sampler=found.sampler)
    again = unfog.load(copy)
    assert not np.array_equal(run.sample(2, steps=3), again.sample(2))
    # Another number of steps, or another sampler, has the schedule's levels again.
    assert np.array_equal(again.sample(2, steps=4), run.sample(2, steps=4))
    assert again.sampler("ddim").grid == "schedule"
    with pytest.raises(RequestError, match=r"grid = tuned .*3 steps.*steps = 4"):
        again.sampler(steps=4, grid="tuned")
    assert exit_status("sample", str(copy), "-n", "1", "--steps", "4", "--out", str(tmp_path / "p")) == 0
    assert "the tuned levels are for 3 steps" in capsys.readouterr().err


def test_tune_draws_as_sample_does_with_the_guide_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("unfog.inference.tune._MANY_STEPS", 4)
    settings = {"data": {"labels": "none"}, "ema_snapshots": {"every": 2}, **SETTINGS}
    own = unfog.train(few_images(), out=tmp_path / "own", steps=20, lr=6e-3, size=16, **settings)
    draw, kept = _GridError.draw, []

    def keep(self, sampler):
        kept.append((self.drawing.seed, sampler, draw(self, sampler)))
        return kept[-1][-1]

    monkeypatch.setattr(_GridError, "draw", keep)
    unfog.tune(own.path, steps=2, pictures=2, tries=1, store=False)
    seed, sampler, drawn = kept[-2]  # the result, on other noise than it was searched on
    pixels = BYTES.to_stored(drawn).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(pixels, own.sample(2, seed=seed, levels=sampler.tuned))
    assert not np.array_equal(pixels, own.sample(2, seed=seed, levels=sampler.tuned, guide="none"))


def test_a_resume_says_what_a_person_changed_and_not_what_tune_did(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("unfog.inference.tune._MANY_STEPS", 8)
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    found = unfog.tune(copy, sampler="ddim", steps=4, pictures=2, tries=6).sampler
    assert found.kind != run.config.sampler.kind

    def changed(**settings: object) -> list[str]:
        capsys.readouterr()
        unfog.resume(copy, **settings)
        said = [line.removeprefix("  changed: ") for line in capsys.readouterr().err.splitlines() if "changed:" in line]
        events = [event["setting"] for event in read_events(copy / "events.jsonl") if event["kind"] == "changed"]
        assert events[len(events) - len(said) :] == said
        return said

    assert not [line for line in changed(steps=42) if "sampler" in line]
    assert RunFolder(copy).read_config().sampler == found
    unfog.tune(copy, sampler="unipc", steps=3, pictures=2, tries=2)
    edited = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(edited.replace("clip = true", "clip = false"))
    lines = changed(steps=44, sampler={"order": 3})  # by a person: one in the file, one here
    assert [line for line in lines if "sampler" in line] == [
        "sampler.clip: True -> False",
        "sampler.order: 2 -> 3",
    ]
    lines = changed(steps=46, sampler={"kind": "heun"})  # which has the schedule's levels, if they were tuned
    assert [line for line in lines if "sampler" in line and "grid" not in line] == ["sampler.kind: 'unipc' -> 'heun'"]


def test_tuned_levels_do_not_outlive_their_sampler_in_a_resume(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    tuned = replace(run.config.sampler, steps=3, grid="tuned", tuned=(0.9, 0.5, 0.1))
    RunFolder(copy).write_config(replace(run.config, sampler=tuned))
    for words, grid in (
        (["--sampler.order", "3"], "tuned"),
        (["--sampler.steps", "4", "--sampler.grid", "karras"], "karras"),
        (["--sampler.kind", "heun", "--sampler.grid", "tuned"], "tuned"),
        (["--sampler.kind", "heun"], "schedule"),
    ):
        RunFolder(copy).write_config(replace(run.config, sampler=tuned))
        assert exit_status("resume", str(copy), *words) == 0
        assert RunFolder(copy).read_config().sampler.grid == grid, words
        said = "the tuned levels are for 3 steps"
        assert (said in capsys.readouterr().err) == (grid == "schedule")
    RunFolder(copy).write_config(replace(run.config, sampler=tuned))
    assert unfog.resume(copy, sampler={"steps": 4}).config.sampler == replace(tuned, steps=4, grid="schedule")


def test_what_is_no_word_of_tune_hides_nothing(run, tmp_path):
    folder, lines = RunFolder(tmp_path), ["sampler.steps: 20 -> 5", "log.every: 1 -> 2"]
    for text in ("", '{"kind": "tuned"}\n', '{"kind": "tuned", "sampler": [5]}\n', '{"kind": "started"}\n[]\n{'):
        (tmp_path / "events.jsonl").write_text(text)
        assert omit_tuned_settings(lines, folder.events, Sampler(steps=5)) == lines
    (tmp_path / "events.jsonl").write_text('{"kind": "tuned", "sampler": {"steps": 5}}\n')
    assert omit_tuned_settings(lines, folder.events, Sampler(steps=5)) == lines[1:]
    assert omit_tuned_settings(lines, folder.events, Sampler(steps=6)) == lines


def test_many_steps_begin_where_the_run_does(run, monkeypatch):
    monkeypatch.setattr("unfog.inference.tune._MANY_STEPS", 4)
    schedule = run.config.diffusion.schedule
    drawing = GenerationSettings.default(run.config, 1, 1)
    outcomes = _GridError(run, Sampler(steps=3), drawing, None, _CallCounter(lambda calls: None))
    levels = outcomes.many(6).visits(schedule)
    assert levels[0].item() == pytest.approx(schedule.limits()[0])
    torch.testing.assert_close(levels[1:6], noise_levels(schedule, 5, "logsnr")[:-1])
    assert outcomes.error(outcomes.many(4).visits(schedule)[:-1]) > 0
    assert outcomes.distance(outcomes.reference) == 0


def test_tune_from_the_command_line_only_looks_if_asked_to(run, capsys, monkeypatch):
    monkeypatch.setattr("unfog.inference.tune._MANY_STEPS", 8)
    before = (run.path / "config.toml").read_bytes()
    flags = ["--steps", "2", "--pictures", "2", "--tries", "2", "--sampler", "ddim", "--no-store"]
    assert exit_status("tune", str(run.path), *flags) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert {name for name, _ in rows} == {*_BUILT_IN, "tuned"}
    assert [float(error) for _, error in rows] == sorted(float(error) for _, error in rows)
    assert (run.path / "config.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sampler": "ddpm"}, "ddpm ends elsewhere each time"),
        ({"sampler": "adaptive"}, "adaptive chooses its own levels"),
        ({"sampler": "euler"}, "sampler.kind"),
        ({"steps": 1}, "steps = 1 must be at least 2"),
        ({"steps": 65}, "steps = 65 must be at most 64"),
        ({"pictures": 0}, "pictures = 0 must be at least 1"),
        ({"tries": 0}, "tries = 0"),
    ],
)
def test_tuning_what_cannot_be_is_refused(run, asked, message):
    before = (run.path / "config.toml").read_bytes()
    with pytest.raises(RequestError, match=message):
        unfog.tune(run.path, **asked)
    assert (run.path / "config.toml").read_bytes() == before


def test_levels_that_cannot_be_written_are_printed(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("unfog.inference.tune._MANY_STEPS", 8)
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    (copy / "events.jsonl").unlink()
    (copy / "events.jsonl").mkdir()
    with pytest.raises(RunError, match="cannot be written to"):
        unfog.tune(copy, sampler="ddim", steps=2, pictures=2, tries=2)
    said = capsys.readouterr().err
    assert "Sampler(kind='ddim', steps=2" in said
    assert all(f"  {grid} " in said for grid in _BUILT_IN)


def test_a_run_that_is_being_trained_is_not_tuned(run):
    with run.folder.locked(), pytest.raises(RequestError, match="another process"):
        unfog.tune(run.path, steps=2)
