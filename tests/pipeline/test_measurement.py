"""Inverse problems from a file or a function: draws in the units of the source, their moments, and what is refused."""

import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import forked
import unfog
from conftest import FEW_PICTURES
from gaussians import normal
from test_export import DEEP, DIT, MAPPED, MPUNET, UNET, latent_run, run_of
from test_export_conditions import UNKNOWN, masked
from test_posterior import COUNT, COVARIANCE, MATRIX, MEAN, NOISE, OBSERVED, closed_form
from unfog.config.schema import Config
from unfog.custom import consent
from unfog.data.full_depth.fit import fit_values
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.diffusion.losses.pixel_loss import AbsoluteError, PseudoHuber
from unfog.diffusion.noise import VP, Cosine
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.pipeline import generate
from unfog.pipeline.measurement import build_measurement, moments, write_posterior
from unfog.pipeline.sample_folder import SampleFolder
from unfog.reporting.image_grids import with_bar, with_caption
from unfog.values import value_maps
from unfog.values.colour_map import colour_table

DOCS = Path(__file__).parents[2] / "docs" / "inverse-problems.md"
CODE = """
import torch

noise = 2.0

def measure(x):
    return x[:, :, ::2, ::2]
"""


def evens(x):
    return x[..., ::2, :]


@pytest.mark.parametrize("network", [UNET, MPUNET, DIT], ids=lambda network: network.kind)
@pytest.mark.parametrize("data", [None, MAPPED, DEEP], ids=["pictures", "mapped", "uint16"])
def test_draws_reproduce_what_was_measured_in_the_units_of_the_source(network, data):
    run = run_of("default", network, 0, **({} if data is None else {"data": data}))
    format = run.config.image_format
    plain = run.sample(2, steps=4)  # in inference mode, whose tensors a posterior must not meet
    y = torch.from_numpy(plain[0].transpose(2, 0, 1).astype(np.float32))[:, ::2]
    samples = run.sample(3, steps=4, measure=evens, observed=y, batch=2)
    assert samples.dtype == format.dtype
    assert samples.shape == (3, *plain.shape[1:])
    drawn, other, expected = (
        format.to_model(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())) for x in (samples, plain[1:], plain[:1])
    )
    # The channels of `MAPPED` have units that differ by a factor of millions, of which the large ones weigh most.
    part = (slice(None), slice(1, 2) if data is MAPPED else slice(None), slice(None, None, 2))
    error, unmeasured = ((x[part] - expected[part]).abs().mean() for x in (drawn, other))
    assert error < (0.4 if data is MAPPED else 0.1) * unmeasured
    assert len({sample.tobytes() for sample in samples}) == 3
    again = run.sample(2, steps=4, measure=evens, observed=y, batch=2)
    assert np.array_equal(again, samples[:2])
    assert np.array_equal(run.sample(2, steps=4), plain)


# Knee, middle and half of each channel: units that differ by a factor of a million.
CURVES = np.array([[1e-6, 1.5, 2.0], [1.0, -3000.0, 500.0], [12.0, 0.5, 2.0], [2.0, 1.0, 0.5]])
CURVED = Data(
    size=8, channels=4, dtype="float32", map="log,standard,arcsinh,log", map_values=tuple(CURVES.ravel().tolist())
)


def measured(data, measure, y, noise):
    config = run_of("default", DIT, 0, data=data).config
    return build_measurement(config, measure, y, noise, torch.device("cpu"), Path("run")).observation


def test_a_measurement_has_the_gradient_of_the_map_of_each_channel():
    x0 = torch.linspace(-2.5, 2.5, 64).reshape(1, 1, 8, 8).repeat(1, 4, 1, 1).requires_grad_()
    observation = measured(CURVED, lambda x: x, np.ones((4, 8, 8)), 1.0)  # y of 1 is its own scale
    y = observation.measure(x0)
    gradient = torch.autograd.grad(y.sum(), x0)[0][0].double().numpy()
    _, middle, half = CURVES.T[:, :, None, None]
    first, linear, wide, last = x0.detach()[0].double().numpy() * half + middle
    below = last < np.log(2)  # where `log` goes on as its tangent
    assert 0 < below.sum() < 64
    values = [np.exp(first), linear, np.sinh(wide) * 12, np.where(below, 2 + 2 * (last - np.log(2)), np.exp(last))]
    slopes = [np.exp(first), np.ones((8, 8)), np.cosh(wide) * 12, np.where(below, 2, np.exp(last))] * half
    # float32 rounds the argument of an exponential, of up to 7, by 4e-7.
    np.testing.assert_allclose(y.detach().numpy().reshape(4, 8, 8), values, rtol=2e-6, atol=1e-5)
    np.testing.assert_allclose(gradient, slopes, rtol=2e-6)


@pytest.mark.slow
def test_draws_through_curved_maps_are_those_of_the_known_posterior():
    _, middle, half = torch.tensor(CURVES, dtype=torch.float32).T[:, :, None, None]
    matrix, covariance, mean = MATRIX.float(), COVARIANCE.float(), MEAN.float()[:, None, None]

    def measure(x):  # undoes the curves of the maps, so that it is MATRIX of model values
        curve = torch.stack([x[:, 0].log(), x[:, 1], (x[:, 2] / 12).asinh(), x[:, 3].log()], 1)
        return torch.einsum("mc,bchw->bmhw", matrix, (curve - middle) / half) + 3

    def denoise(x, logsnr):
        alpha, sigma = (float(part) for part in VP()(logsnr[:1]))
        gain = alpha * covariance @ torch.linalg.inv(alpha**2 * covariance + sigma**2 * torch.eye(4))
        return mean + torch.einsum("dc,bchw->bdhw", gain, x - alpha * mean)

    # With a knee far below all guesses, as the logarithm of a tangent is another curve.
    data = replace(CURVED, map_values=(*CURVED.map_values[:9], 1e-4, *CURVED.map_values[10:]))
    y = (OBSERVED.float() + 3)[:, None, None].expand(2, 8, 8)
    given = measured(data, measure, y, NOISE)
    assert given.affine
    draws = Sampler("dpmpp", 60, clip=False)(
        given.posterior(denoise, VP()), VP(), Cosine(steps=0), normal(COUNT // 64, 4, 8, 8, dtype=torch.float32)
    )
    x = draws.permute(0, 2, 3, 1).reshape(-1, 4).double()
    expected, spread = closed_form(NOISE)
    # As in test_posterior: four standard errors of as many exact draws, and 2% for 60 steps.
    tolerance = 4 / math.sqrt(len(x))
    assert ((x.mean(0) - expected).abs() < tolerance * spread.diagonal().sqrt() + 1e-3).all()
    assert ((torch.cov(x.T) - spread).abs() < (math.sqrt(2) * tolerance + 0.02) * spread.diagonal().max()).all()


def test_draws_are_of_any_class_unless_one_is_asked_for():
    run = run_of("default", DIT, 3)
    assert run.config.label_dropout > 0
    problem = {"measure": evens, "observed": Y}
    assert run.prepare(2, **problem).generation.given == (("class", (-1,)),)
    assert run.prepare(2, label=0, **problem).generation.given == (("class", (0,)),)
    with pytest.raises(RequestError, match="class has 2 values, and measure draws one posterior"):
        run.prepare(2, label=(0, 1), **problem)
    one, other = (run.sample(1, steps=3, label=label, **problem) for label in ((), 0))
    assert not np.array_equal(one, other)


def test_complex_measurements_and_noise_by_value_are_taken():
    run = run_of("default", DIT, 0, data=MAPPED)

    def fourier(x):
        return torch.fft.rfft2(x[:, 1], norm="ortho")[..., :2]

    def measured(samples):
        return fourier(torch.from_numpy(samples.transpose(0, 3, 1, 2).copy()))

    y = measured(run.sample(1, steps=3, seed=5))[0]
    samples = run.sample(2, steps=3, measure=fourier, observed=y, noise=np.full((8, 2), 0.5))
    assert (measured(samples) - y).abs().mean() < 0.1 * (measured(run.sample(2, steps=3)) - y).abs().mean()
    for noise in (np.ones(3), np.ones((8, 3)), np.ones(2)):  # the last would be repeated for each row, unasked
        with pytest.raises(RequestError, match=r"noise is not a number, or one for each value.*\[8, 2\]"):
            run.sample(1, measure=fourier, observed=y, noise=noise)


def test_the_misfit_is_in_deviations_of_the_noise_and_by_channel(capsys):
    run = run_of("default", DIT, 0, data=replace(MAPPED, map="standard"))
    x = torch.randn(1, *run.config.input_shape)
    y = run.config.image_format.values.to_units(x)[0, :2]
    noise = torch.tensor([0.5, 400.0])[:, None, None]
    options = {"measure": lambda x: x[:, :2], "device": torch.device("cpu"), "run": Path("photos")}
    problem = build_measurement(
        run.config, observed=y + noise * torch.tensor([4.0, 2.0])[:, None, None], noise=noise, **options
    )
    found = problem.misfit([x, x])
    assert found == "draws differ from y by 3.16 times the noise (root mean square); y[0]: 4, y[1]: 2"
    without = build_measurement(run.config, observed=y + 3, noise=None, **options)
    assert without.misfit([x]) == "draws differ from y by 3 (root mean square); noise is 0"
    run.sample(1, steps=1, measure=lambda x: x[:, :2], observed=y, noise=noise)
    assert re.search(r"draws differ from y by [\d.e+]+ times the noise", capsys.readouterr().err)


def test_a_file_defines_measure_and_noise(tmp_path, capsys):
    run = run_of("default", DIT, 0)
    (tmp_path / "halves.py").write_text(CODE)
    np.save(tmp_path / "y.npy", np.full((3, 4, 4), 90, np.uint8))
    one = run.sample(2, steps=3, measure=tmp_path / "halves.py", observed=tmp_path / "y.npy")
    assert "measure: runs" in capsys.readouterr().err
    assert "given halves.py" in one.caption
    y = np.full((3, 4, 4), 90)
    assert np.array_equal(one, run.sample(2, steps=3, measure=lambda x: x[:, :, ::2, ::2], observed=y, noise=2.0))


Y = np.zeros((3, 4, 8), np.float32)
REFUSED = {
    "alone": ({"measure": evens}, "needs observed"),
    "without measure": ({"observed": Y}, "needs measure"),
    "noise alone": ({"noise": 1.0}, "noise is that of a measurement"),
    "another shape": (
        {"measure": evens, "observed": Y[:, :2]},
        r"\[3, 4, 8\] for one image.*\[3, 2, 8\]",
    ),
    "complex": ({"measure": evens, "observed": Y.astype(complex)}, "observed is complex"),
    "no batch": ({"measure": lambda x: x[0, ..., ::2, :], "observed": Y}, "first axis must be that of images"),
    "no tensor": ({"measure": lambda x: 3, "observed": Y}, "returned int"),
    "no gradient": ({"measure": lambda x: evens(x).detach(), "observed": Y}, "no gradient"),
    "rounding": ({"measure": lambda x: evens(x).round(), "observed": Y}, "no gradient"),
    "numpy": ({"measure": lambda x: x.numpy(), "observed": Y}, "measure failed.*RuntimeError"),
    "NaN": ({"measure": lambda x: evens(x - 500).sqrt(), "observed": Y}, "measure returns NaN"),
    "NaN observed": ({"measure": evens, "observed": np.where(np.arange(8) < 2, math.nan, Y)}, "24 values that are NaN"),
    "objects": ({"measure": evens, "observed": np.array([None])}, "observed is object"),
    "negative noise": ({"measure": evens, "observed": Y, "noise": -1.0}, "at least 0"),
    "guidance": ({"measure": evens, "observed": Y, "guidance": 2.0}, "guidance changes the prior"),
    "an image": ({"measure": evens, "observed": Y, "image": np.zeros((8, 8, 3), np.uint8)}, "two ways to sample"),
}


@pytest.mark.parametrize(("settings", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_problem_is_refused(settings, said):
    with pytest.raises(RequestError, match=said):
        run_of("default", DIT, 0).sample(1, steps=2, **settings)


def test_latents_are_refused(tmp_path):
    with pytest.raises(RequestError, match="generates latents"):
        latent_run(tmp_path / "autoencoder", "ours").sample(1, measure=evens, observed=Y)


def test_code_of_others_is_not_run(tmp_path, monkeypatch):
    run = run_of("default", DIT, 0)
    run.folder.path = tmp_path / "run"
    run.folder.path.mkdir()
    for name in ("run/halves.py", "halves.py", "broken.py", "empty.py"):
        (tmp_path / name).write_text({"broken.py": "1 / 0", "empty.py": ""}.get(name, CODE))
    (tmp_path / "link.py").symlink_to(tmp_path / "run/halves.py")
    for name, said in {
        "run/halves.py": "lies in the folder of the run",
        "link.py": "lies in the folder of the run",
        "none.py": "cannot be read",
        "broken.py": "ZeroDivisionError",
        "empty.py": "defines no function",
    }.items():
        with pytest.raises(RequestError, match=said):
            run.sample(1, measure=tmp_path / name, observed=Y)
    monkeypatch.setenv(consent.STARTED_BY, "1")
    with pytest.raises(RequestError, match="only a person"):
        run.sample(1, measure=tmp_path / "halves.py", observed=Y)


def test_a_pickled_observation_is_not_read(tmp_path):
    np.save(tmp_path / "y.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(RequestError, match="cannot be read"):
        run_of("default", DIT, 0).sample(1, measure=evens, observed=tmp_path / "y.npy")


def test_moments_are_those_of_all_draws():
    draws = np.random.default_rng(0).normal(1e4, 1, (7, 3, 2, 1))
    mean, deviation = moments(iter(draws))
    np.testing.assert_allclose(mean, draws.mean(0), rtol=1e-6)
    np.testing.assert_allclose(deviation, draws.std(0, ddof=1), rtol=1e-5)


@pytest.mark.parametrize("colours", ["grey", "viridis"])
def test_the_deviation_has_the_colours_of_the_view_and_a_bar_with_its_values(tmp_path, monkeypatch, colours):
    maps = value_maps.flat(value_maps.fit("minmax", np.array([0.0, 9.0]).reshape(2, 1, 1, 1)))
    data = Data(size=4, channels=1, dtype="float32", map="minmax", map_values=maps)
    config = Config(data=data).with_view("0" if colours == "grey" else "0:viridis")
    draws = np.full((2, 4, 4, 1), 3, np.float32)
    draws[:, 0, 0] = [[1], [7]]
    folder = SampleFolder(tmp_path, "", 2, view=config.view)
    folder.write(range(2), draws)
    observation = SimpleNamespace(observed=torch.zeros(1))
    bars = []
    monkeypatch.setattr(generate, "with_bar", lambda *given: bars.append(given[2]) or with_bar(*given))
    problem = SimpleNamespace(observation=observation, misfit=lambda draws: "", name="y")
    write_posterior(folder, config, problem)
    table = colour_table(colours)
    for name, corner, other in (("mean", 113, 85), ("deviation", 255, 0)):  # (1 + 7) / 2 and 3 of 0 to 9
        picture = np.asarray(Image.open(tmp_path / f"{name}.png"))
        assert picture.shape[1] == 128  # enlarged
        below = len(with_bar(picture[:128], table, ["0"] * 3))  # the image and its bar
        assert len(picture) > below  # a line says what it is
        picture = picture[-below:]
        assert np.abs(picture[[0, 127], [0, 127]].astype(int) - table[[corner, other]]).max() <= 2
        assert np.array_equal(picture[128 + 8, [0, 127]], table[[0, 254]])  # 256 levels on 128 pixels
    assert bars == [["0", "4.5", "9"], ["0", "2.121", "4.243"]]  # 3 sqrt(2) at the most


def test_a_mean_beyond_the_last_colour_marks_the_end_of_its_bar(tmp_path, monkeypatch):
    data = Data(size=4, channels=2, dtype="float32", map="linear", range=(0, 9))
    config = Config(data=data).with_view("1")
    folder = SampleFolder(tmp_path, "", 2, view=config.view)
    draws = np.full((2, 4, 4, 2), 3, np.float32)
    draws[:, 0, 0, 1] = 9.5
    folder.write(range(2), draws)
    said = []
    monkeypatch.setattr(generate, "with_bar", lambda *given: said.append(given[2]) or with_bar(*given))
    monkeypatch.setattr(generate, "with_caption", lambda *given: said.append(given[1]) or with_caption(*given))
    observation = SimpleNamespace(observed=torch.zeros(1))
    write_posterior(folder, config, SimpleNamespace(observation=observation, misfit=lambda draws: "", name="y"))
    ends = ["mean of 2 draws, channel 1"], ["0", "4.5", "> 9"], ["deviation of 2 draws, channel 1"]
    assert said[:3] == [*ends]


def test_draws_that_leave_the_training_values_are_named(tmp_path, capsys):
    fields = np.random.default_rng(0).uniform([10, -4], [30, 4], (9, 8, 8, 2)).astype(np.float32)
    fields[0, 0, 0], fields[1, 0, 0] = (10, -4), (30, 4)
    np.save(tmp_path / "fields.npy", fields)
    made = prepare(open_source(str(tmp_path / "fields.npy")), Data(map="arcsinh,standard", held_out=0))
    data = fit_values(made)[0].settings
    assert data.range_in_training == ((10, 30), (-4, 4))
    config = Config(data=data).with_view("0")
    draws = fields[:4].copy()
    problem = SimpleNamespace(observation=SimpleNamespace(observed=torch.zeros(1)), misfit=lambda draws: "", name="y")

    def said(name):
        folder = SampleFolder(tmp_path / name, "", 4, view=config.view)
        folder.path.mkdir()
        folder.write(range(4), draws)
        write_posterior(folder, config, problem)
        return capsys.readouterr().err

    draws[1, 2, 3], draws[2, 4, 4] = (30.9, 4.7), (9.5, -4.7)  # within 10% of the range
    assert "warning" not in said("within")
    draws[2, 4, 4, 1], draws[3, 5, 5, 1] = -6.5, 5.5
    found = said("beyond")
    assert "warning: 2 draws of 4 left the training values, draw 2 by most: it has -6.5 to" in found
    assert "in channel 1, and they have -4 to 4; take more steps" in found


@pytest.mark.parametrize(
    ("data", "range"),
    [
        (Data(channels=2, dtype="float32", range=(-5, 8)), ((-5, 8),) * 2),
        (Data(channels=2, dtype="uint16", range=(0, 4095)), ()),
        (Data(channels=1, dtype="float32", map="standard", map_values=(1, 0, 1)), ()),  # a run of an earlier version
        (Data(channels=2, dtype="float32", map="standard", map_values=(1, 0, 1) * 2, map_range=(0, 1)), ()),  # damaged
    ],
    ids=["range", "integers", "earlier", "damaged"],
)
def test_the_range_of_training_values_is_known_only_from_them(data, range):
    assert data.range_in_training == range


@pytest.mark.parametrize("loss", [None, AbsoluteError(), PseudoHuber()], ids=["mse", "l1", "pseudo-huber"])
def test_a_loss_without_the_mean_is_warned_of(capsys, loss):
    run = run_of("default", DIT, 0)
    if loss:
        run.config = replace(run.config, diffusion=replace(run.config.diffusion, loss=loss))
    run.prepare(1, measure=evens, observed=Y)
    said = capsys.readouterr().err
    assert f"warning: loss = {loss.kind}" in said if loss else "warning" not in said


def known_alone(x):
    return x.flatten(1)[:, torch.from_numpy(~UNKNOWN).flatten()]


def filled(x):
    return known_alone(torch.where(torch.from_numpy(UNKNOWN), 7.0, x))


@pytest.mark.parametrize(("unknown", "dtype"), [("nan", "float32"), ("0", "uint16")])
def test_known_pixels_are_measured_and_unknown_ones_stay_unknown(tmp_path, unknown, dtype):
    run = masked(unknown, dtype=dtype)
    format, hidden = run.config.image_format, UNKNOWN.transpose(1, 2, 0)
    y = np.linspace(500, 3500, int((~UNKNOWN).sum()), dtype=np.float32)
    draws = np.asarray(run.sample(3, steps=4, measure=known_alone, observed=y))
    assert np.array_equal(draws, run.sample(3, steps=4, measure=filled, observed=y), equal_nan=True)
    assert np.array_equal(~format.values.known(draws), np.broadcast_to(hidden, draws.shape))
    free = np.asarray(run.sample(3, steps=4))
    one, other = (np.abs(x.transpose(0, 3, 1, 2)[:, ~UNKNOWN].astype(np.float32) - y).mean() for x in (draws, free))
    assert one < 0.1 * other
    problem = build_measurement(run.config, known_alone, y, None, run.device, Path("run"))
    folder = SampleFolder(tmp_path, "", 3, view=run.config.view)
    folder.write(range(3), draws)
    write_posterior(folder, run.config, problem)
    mean, deviation = (np.load(tmp_path / f"{name}.npy") for name in ("mean", "deviation"))
    known = draws[:, ~hidden].astype(np.float64)
    np.testing.assert_allclose(mean[~hidden], known.mean(0), rtol=1e-6)
    np.testing.assert_allclose(deviation[~hidden], known.std(0, ddof=1), rtol=1e-4, atol=1e-3)
    assert np.isnan(deviation[hidden]).all()
    assert np.isnan(mean[hidden]).all() if unknown == "nan" else not mean[hidden].any()


def test_a_measurement_of_unknown_pixels_is_refused_with_its_share():
    # Rows 0, 2, 4 and 6 of four channels; those of which a pixel is unknown in all images depend on it.
    y = np.zeros((4, 4), np.float32)
    share = UNKNOWN[:, ::2].any(2).mean()
    with pytest.raises(RequestError, match=rf"{UNKNOWN.mean():.0%} of the values.*{share:.0%} of what measure returns"):
        masked().sample(1, steps=2, measure=lambda x: evens(x).mean(3), observed=y)


@pytest.mark.slow
def test_the_command_writes_draws_mean_and_deviation(tmp_path):
    fields = np.random.default_rng(0).normal(-500, 900, (24, 12, 16, 4)).astype(np.float32)
    network = "unet:channels=8/8,attention=0/0,mid_attention=0,norm_groups=4"
    run = unfog.train(fields, out=tmp_path / "run", steps=2, network=network, device="cpu", batch=8, **FEW_PICTURES)
    (tmp_path / "halves.py").write_text(CODE)
    np.save(tmp_path / "y.npy", fields[0].transpose(2, 0, 1)[:, ::2, ::2])
    words = ["sample", run.path, "--measure", tmp_path / "halves.py", "--observed", tmp_path / "y.npy", "-n", "3"]
    done: subprocess.CompletedProcess = forked.run([*words, "--steps", "3", "--out", tmp_path / "out"])
    assert done.returncode == 0, done.stderr
    assert "times the noise" in done.stderr
    draws = np.stack([np.load(tmp_path / f"out/{i:06d}.npy") for i in range(3)])
    np.testing.assert_allclose(np.load(tmp_path / "out/mean.npy"), draws.mean(0), rtol=1e-5)
    np.testing.assert_allclose(np.load(tmp_path / "out/deviation.npy"), draws.std(0, ddof=1), rtol=1e-3, atol=1e-4)
    assert {"mean.png", "deviation.png", "grid.png", "000002.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    refused = forked.run(words[:4])
    assert refused.returncode != 0
    assert "--observed" in refused.stderr


def test_the_page_solves_a_problem_from_a_file_and_from_python(tmp_path, monkeypatch):
    run = run_of("default", DIT, 0)
    code = dict(re.findall(r"<!-- code: (measure\.py|python) -->\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL))
    (tmp_path / "measure.py").write_text(code["measure.py"])
    y = np.full((1, 4, 4), 100, np.float32)
    np.save(tmp_path / "y.npy", y)
    monkeypatch.setattr(unfog, "load", lambda path: run)
    found = {"y": y, "measure": tmp_path / "measure.py"}
    exec(compile(code["python"], DOCS.name, "exec"), found)
    assert np.array_equal(found["draws"], run.sample(8, measure=tmp_path / "measure.py", observed=tmp_path / "y.npy"))
    assert found["deviation"].shape == found["mean"].shape == (8, 8, 3)
