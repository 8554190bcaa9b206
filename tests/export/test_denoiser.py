"""The denoiser export: D(x, sigma) and its score without Unfog, with the run's values, and adapters for solvers."""

import copy
import math
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from test_export import (
    DEEP,
    DIT,
    LEARNED,
    LINEAR,
    MAPPED,
    MPUNET,
    SEAMLESS,
    SHIFTED,
    TERMINAL,
    UNET,
    check_values,
    latent_run,
    run_card_code,
    run_of,
)
from unfog.diffusion.ddpm_schedules import Cosine, Linear
from unfog.diffusion.denoiser import Denoiser
from unfog.errors import RequestError, RunError
from unfog.inference import export as exporting
from unfog.values.conditions import Conditions

DOCS = Path(__file__).parents[2] / "docs" / "inverse-problems.md"
CONTINUOUS = replace(LINEAR, schedule=Cosine(steps=0), conditioning="timestep")
CASES = {
    "default": ("default", UNET, 3, {}),
    "edm": ("edm", MPUNET, 3, {}),
    "ddpm": ("ddpm", UNET, 0, {}),
    "dit, shifted": ("default", DIT, 3, {"diffusion": SHIFTED}),
    "linear": ("ddpm", DIT, 0, {"diffusion": LINEAR}),
    "zero terminal": ("ddpm", DIT, 3, {"diffusion": TERMINAL}),
    "continuous": ("ddpm", DIT, 0, {"diffusion": CONTINUOUS}),
    "continuous linear": ("ddpm", DIT, 0, {"diffusion": replace(LINEAR, schedule=Linear(steps=0))}),
    "learned variance": ("ddpm", DIT, 3, {"diffusion": LEARNED}),
    "seamless": ("default", UNET, 0, {"data": SEAMLESS}),
    "mapped": ("default", DIT, 3, {"data": MAPPED}),
    "uint16": ("default", UNET, 0, {"data": DEEP}),
}


def exported(run, folder: Path):
    run.export(folder, format="denoiser")
    return runpy.run_path(str(folder / "denoiser.py"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_denoiser_is_that_of_the_run_at_all_levels_and_classes(tmp_path, case):
    name, network, classes, changes = case
    run = run_of(name, network, classes, **changes)
    code = exported(run, tmp_path / "out")
    assert "unfog" not in re.sub(r'""".*?"""|"unfog"', "", (tmp_path / "out/denoiser.py").read_text(), flags=re.DOTALL)
    denoiser, ours = code["load"](tmp_path / "out/denoiser.safetensors"), Denoiser(run.network, run.config.diffusion)
    assert denoiser.shape == run.config.input_shape
    assert 0 < denoiser.sigma_min < 0.05
    assert denoiser.sigma_max > 10
    # Each image at its own level.
    sigma = torch.tensor([0.03, 0.4, 1.7, 9.0]).clamp(denoiser.sigma_min)
    x = torch.randn(4, *denoiser.shape) * (1 + sigma)[:, None, None, None]
    for label in [None, torch.tensor([0, 2, 1, 3])] if classes else [None]:
        logsnr = -2 * sigma.log()
        alpha = run.config.diffusion.path(logsnr)[0][:, None, None, None]
        with torch.no_grad():
            expected = ours(alpha * x, logsnr, Conditions.of(label))
        found = denoiser(x, sigma, label) if classes else denoiser(x, sigma)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
        scored = (found - x) / sigma.square()[:, None, None, None]
        torch.testing.assert_close(denoiser.score(x, sigma, label), scored)


@pytest.mark.slow
def test_a_denoiser_has_gradients_of_its_input_a_range_of_noise_and_the_values_of_the_images(tmp_path):
    code = exported(run_of(), tmp_path / "out")
    denoiser = code["load"](tmp_path / "out/denoiser.safetensors")
    x = torch.randn(2, *denoiser.shape, requires_grad=True)
    denoiser(x, 0.5).sum().backward()
    assert x.grad.abs().sum() > 0
    assert not any(parameter.requires_grad for parameter in denoiser.parameters())
    with torch.no_grad():
        assert torch.equal(denoiser(x, 0.0), denoiser(x, denoiser.sigma_min))
    with pytest.raises(ValueError, match="above the most that was trained"):
        denoiser(x, 1.1 * denoiser.sigma_max)
    stored = torch.arange(256, dtype=torch.uint8)
    assert denoiser.to_model(stored)[[0, -1]].tolist() == [-1, 1]
    assert torch.equal(denoiser.to_stored(denoiser.to_model(stored)).round().byte(), stored)


@pytest.mark.slow
@pytest.mark.parametrize("data", [MAPPED, DEEP], ids=["mapped", "uint16"])
def test_a_denoiser_carries_the_value_map(tmp_path, data):
    run = run_of("default", DIT, 0, data=data)
    code = exported(run, tmp_path / "out")
    denoiser = code["load"](tmp_path / "out/denoiser.safetensors")
    check_values(run, code, denoiser.model["values"])
    # A measurement in stored units has gradients at all values, also where another channel has an infinite curve.
    x = torch.full((1, *denoiser.shape), 40.0, requires_grad=True)
    stored = denoiser.to_stored(x)
    assert torch.equal(stored, run.config.image_format.values.to_units(x))
    stored[:, 1].sum().backward()
    assert x.grad.isfinite().all()
    assert run_card_code(tmp_path / "out", (8, 8))["x"].isfinite().all()


def test_a_label_of_no_class_is_refused(tmp_path):
    code = exported(run_of("default", DIT, 0), tmp_path / "out")
    denoiser = code["load"](tmp_path / "out/denoiser.safetensors")
    with pytest.raises(ValueError, match="no classes"):
        denoiser(torch.zeros(1, *denoiser.shape), 1.0, torch.tensor([0]))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("denoiser") / "out"
    return exported(run_of("default", DIT, 3), folder)["load"](folder / "denoiser.safetensors")


@pytest.mark.parametrize(
    ("sigma", "label", "word"),
    [
        (math.nan, None, "not a level"),
        (-1.0, None, "not a level"),
        ([1.0, 1.0], None, "sigma has 2 values for 3 images"),
        (1.0, 4, "whole number from 0 to 3"),
        (1.0, [0, 1, -1], "whole number from 0 to 3"),
        (1.0, [0.0, 1.0, 2.0], "whole number from 0 to 3"),
        (1.0, [0, 1], "label has 2 values for 3 images"),
    ],
)
def test_what_is_no_level_or_label_is_refused(small, sigma, label, word):
    with pytest.raises(ValueError, match=word):
        small(torch.zeros(3, *small.shape), sigma, label)


def test_what_is_no_batch_of_its_images_is_refused(small):
    for x in (torch.zeros(small.shape), torch.zeros(3, 1 + small.shape[0], *small.shape[1:])):
        with pytest.raises(ValueError, match="x has the shape"):
            small(x, 1.0)


@pytest.mark.parametrize("given", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.float64])
def test_images_of_other_types_are_taken(small, given, weights):
    x = torch.randn(2, *small.shape, generator=torch.Generator().manual_seed(0)).to(given)
    found = copy.deepcopy(small).to(weights)(x, 0.5)
    assert found.dtype == (torch.float64 if torch.float64 in (given, weights) else torch.float32)
    torch.testing.assert_close(found.float(), small(x.float(), 0.5), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_weights_of_another_file_are_refused(tmp_path):
    run_of("default", DIT, 0).export(tmp_path / "weights", format="safetensors")
    code = exported(run_of("default", DIT, 0), tmp_path / "out")
    with pytest.raises(ValueError, match="--format denoiser"):
        code["load"](tmp_path / "weights/model.safetensors")


@pytest.mark.slow
def test_the_card_of_a_denoiser_draws(tmp_path):
    run_of("default", DIT, 3).export(tmp_path / "out", format="denoiser")
    found = run_card_code(tmp_path / "out", (8, 8))
    assert found["x"].isfinite().all()


def test_a_denoiser_that_differs_leaves_nothing(tmp_path, monkeypatch):
    source = exporting._denoiser_source
    monkeypatch.setattr(
        exporting, "_denoiser_source", lambda run: source(run).replace("alpha * b - ", "1.0001 * alpha * b - ")
    )
    with pytest.raises(RunError, match="differs from the run"):
        run_of("default", DIT, 0).export(tmp_path / "out", format="denoiser")
    assert not (tmp_path / "out").exists()


def test_latents_are_refused(tmp_path):
    with pytest.raises(RequestError, match=r"denoiser is of pixels.*--format safetensors"):
        latent_run(tmp_path / "autoencoder", "ours").export(tmp_path / "out", format="denoiser")


# Adapters. Both packages are optional: the tests run where they are installed.


def prior(folder: Path):
    code = exported(run_of("default", DIT, 3), folder)
    return code, code["load"](folder / "denoiser.safetensors")


def test_deepinv_takes_the_denoiser(tmp_path):
    deepinv = pytest.importorskip("deepinv")
    code, denoiser = prior(tmp_path / "out")
    model = code["for_deepinv"](denoiser)
    assert isinstance(model, deepinv.models.Denoiser)
    x = torch.rand(2, *denoiser.shape)
    torch.testing.assert_close(model(x, 0.2), (denoiser(2 * x - 1, 0.4) + 1) / 2)
    both = model(x, torch.tensor([0.1, 0.3]), label=torch.tensor([0, 2]))
    torch.testing.assert_close(both[1:], model(x[1:], 0.3, label=torch.tensor([2])), atol=1e-5, rtol=1e-5)


def test_azula_takes_the_denoiser(tmp_path):
    azula_noise = pytest.importorskip("azula.noise")
    from azula.sample import DDIMSampler

    code, denoiser = prior(tmp_path / "out")
    x_t, t = torch.randn(2, *denoiser.shape), torch.tensor(0.6)
    for schedule in (azula_noise.VPSchedule(), azula_noise.RectifiedSchedule()):
        alpha, sigma = schedule(t)
        mean = code["for_azula"](denoiser, schedule)(x_t, t).mean
        torch.testing.assert_close(mean, denoiser(x_t / alpha, sigma / alpha))
    model = code["for_azula"](denoiser)
    sampler = DDIMSampler(model, steps=4, silent=True)
    assert sampler(sampler.init((2, *denoiser.shape)), label=torch.tensor([0, 1])).isfinite().all()


@pytest.mark.parametrize("package", ["deepinv", "azula"])
def test_the_page_solves_a_problem_with_each_package(tmp_path, package, monkeypatch):
    pytest.importorskip(package)
    prior(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    block = re.search(rf"<!-- code: {package} -->\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
    found: dict = {}
    exec(compile(block.replace("OUT", "out").replace("32", "8"), f"{DOCS.name}, {package}", "exec"), found)
    assert found["x"].isfinite().all()
    assert math.prod(found["x"].shape) >= 3 * 8 * 8
