"""Networks, what they see, and what they answer, each with each: trained, and taken through all that a run is for."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from random_weights import random_autoencoder
from unfog.config.spec_strings import parse_spec
from unfog.data.packs.latent_cache import Normalise
from unfog.device.sharded_rng import seed_generators
from unfog.diffusion.denoiser import Autoguided, Denoiser
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.likelihood import bits_per_dim
from unfog.diffusion.noise import VP, Cosine, NoiseSource
from unfog.diffusion.objective import Objective
from unfog.diffusion.target import X0, Eps, V
from unfog.errors import RequestError
from unfog.inference.compute_metrics import LEVELS, bits_per_value
from unfog.inference.guide import check_guide
from unfog.inference.loaded_run import weights_digest
from unfog.inference.run import Run
from unfog.models.autoencoder_settings import Autoencoder
from unfog.models.network_settings import build_model
from unfog.models.settings import DiT, MPUNet, UNet
from unfog.pipeline.build import build_held_out_set, without_augmentation
from unfog.pipeline.edit_images import build_edit
from unfog.pipeline.latents import ImageMap, open_run_autoencoder
from unfog.pipeline.load_data import load_images
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.records import read_metrics
from unfog.runs.dry_run_checks import shorten_evaluation
from unfog.runs.replay import verify
from unfog.training.precision import Precision
from unfog.training.settings import Evaluate, Optimizer, PowerEma
from unfog.training.stability.nan_debug import NanReport
from unfog.training.state import TrainState
from unfog.values.conditions import NO_CONDITIONS
from unfog.values.image_format import BYTES

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
KINDS = {"unet": UNet, "mpunet": MPUNet, "dit": DiT}
NETWORKS = {
    "unet": "unet:channels=8/16,attention=0/1,mid_attention=0,norm_groups=4,head_channels=8",
    "mpunet": "mpunet:channels=8,attention=1,head_channels=8",
    "dit": "dit:width=16,depth=2,head_channels=8,patch=2",
}
SETTINGS = {
    "precision": "fp32",
    "device": "cpu",
    "batch": 8,
    "steps": 2,
    "size": 16,
    "data": {"held_out": 0.2},
    "preview": {"every": -1, "images": 2},
    "evaluate": {"every": 1, "images": 100, "levels": 2},
    "log": {"every": 1},
    "checkpoint": {"every": 1, "keep": 9},
    "averages": {"every": 1},
    "sampler": {"steps": 3},
}
LEARNED = {"path": "vp", "schedule": "cosine:steps=1000", "target": "v", "diffusion": {"learned_variance": True}}
CELLS = list(itertools.product(NETWORKS, ("pixels", "latents"), ("plain", "learned")))
QUICK = [("mpunet", "latents", "plain"), ("dit", "latents", "learned"), ("mpunet", "pixels", "learned")]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Sixty pictures of noise in each of two classes."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for i in range(120):
        (folder / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(folder / "ab"[i % 2] / f"{i:03}.png")
    return folder


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory):
    return str(random_autoencoder(tmp_path_factory.mktemp("codec") / "mine").folder)


def trained(out, photos, autoencoder, network, seen, answer, **changes):
    """A run of one cell of the matrix."""
    return unfog.train(photos, out=out, **of_cell(autoencoder, network, seen, answer) | changes)


def of_cell(autoencoder, network, seen, answer):
    """The settings of one."""
    on, says = {"codec": autoencoder} if seen == "latents" else {}, LEARNED if answer == "learned" else {}
    return SETTINGS | {"network": NETWORKS[network]} | on | says


@pytest.fixture(scope="module")
def on_latents(photos, autoencoder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNFOG_CACHE", str(tmp_path_factory.mktemp("cache")))
        return trained(tmp_path_factory.mktemp("run") / "latents", photos, autoencoder, "unet", "latents", "plain")


def images_of(run):
    with StopSignals() as stop:
        return load_images(run.config, stop)[0]


def halves():
    """A mask, white below: rows 7 to 15, so that the middle row of latents is known in part."""
    mask = np.zeros((16, 16), bool)
    mask[7:] = True
    return mask


def each(cells):
    """Those of QUICK always, the rest with `make test-all`."""
    return [
        pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.exhaustive, id="-".join(cell)) for cell in cells
    ]


@pytest.mark.parametrize(("network", "seen", "answer"), each(CELLS))
def test_every_network_draws_pixels_and_latents_whatever_it_answers(
    photos, autoencoder, tmp_path, network, seen, answer
):
    run = trained(tmp_path / "run", photos, autoencoder, network, seen, answer)
    channels, side, _ = run.config.input_shape
    assert (channels, side) == ((3, 4) if seen == "latents" else (3, 16))
    x = torch.randn(2, channels, side, side)
    with torch.no_grad():
        y = run.network(x, torch.tensor([10.0, 500.0]), torch.tensor([0, 2]))
    assert y.shape == (2, channels * (2 if answer == "learned" else 1), side, side)
    assert run.checkpoint.step == 2
    for kind in ("dpmpp", "ddpm"):
        pictures = run.sample(2, sampler=kind)
        assert pictures.shape == (2, 16, 16, 3)
        assert len(np.unique(pictures)) > 50
        assert not np.array_equal(pictures[0], pictures[1])
        guided = run.sample(2, sampler=kind, guide=1, guidance=3.0)
        assert not np.array_equal(guided, pictures)


@pytest.mark.parametrize(("network", "seen", "answer"), each([*QUICK[1:], ("unet", "latents", "learned")]))
def test_all_that_a_run_is_for(photos, autoencoder, tmp_path, network, seen, answer, monkeypatch):
    monkeypatch.setattr("unfog.inference.tune._MANY_STEPS", 4)
    monkeypatch.setattr("unfog.checks.settings.overfit_one_batch._MOST_SECONDS", 0.5)
    run = trained(tmp_path / "run", photos, autoencoder, network, seen, answer)
    assert "equal to the bit" in verify(RunFolder(run.path))
    one = build_edit(run.config, photos / "a" / "000.png", halves(), None, None)
    painted = run.sample(2, image=photos / "a" / "000.png", mask=halves(), repeats=2)
    assert (painted[:, :7] == BYTES.to_stored(one.image).permute(1, 2, 0).numpy()[:7]).all()
    assert unfog.tune(run.path, steps=2, pictures=2, tries=2, device="cpu").reference > 0
    names = ["sliced", "held_out"] + ["bits"] * (seen == "pixels")
    found = run.evaluate(names, n=10, steps=2)
    assert {one.metric for one in found.measured} >= set(names)
    assert np.isfinite([one.value for one in found.measured]).all()
    assert unfog.ema_sweep(run.path, n=4, widths=(0.05, 0.1), device="cpu").rows
    findings = unfog.doctor(run.path, out=tmp_path / "page", device="cpu")
    assert not [
        finding for finding in findings if "not looked at" in finding.evidence and "weights" in finding.evidence
    ]
    settings = of_cell(autoencoder, network, seen, answer)
    settings["evaluate"] = settings["evaluate"] | {"metrics": ("sliced",), "share": 0.5}
    before = unfog.doctor(photos, out=tmp_path / "other", **settings)
    assert not [finding for finding in before if finding.severity == "fatal"]


def test_a_dry_run_measures_few_pictures_and_is_refused_none():
    settled = Evaluate(10, metrics=("kid", "fid"), samples=5000, reference=10_000, metrics_every=50, best="fid")
    small = shorten_evaluation(settled, 2)
    assert (small.every, small.metrics_every, small.samples, small.reference) == (2, 2, 10, 100)
    assert (small.metrics, small.best) == (("kid", "fid"), "held_out_loss")
    assert shorten_evaluation(Evaluate(10), 2) == Evaluate(2)
    assert shorten_evaluation(Evaluate(-1, metrics=("kid",)), 2) == Evaluate(-1, metrics=("kid",))


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_image_to_blame_is_found_in_every_network(kind):
    torch.manual_seed(0)
    model = build_model(parse_spec({k: v() for k, v in KINDS.items()}, NETWORKS[kind]), 1).train()
    for parameter in model.parameters():  # where a fresh network has zeros, nothing would pass
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    state = TrainState(model, Optimizer(lr=1e-3), PowerEma(), Precision("fp32", CPU))
    objective = Objective(Diffusion())

    def forward(first, count):
        seed_generators(0, first)
        x0 = torch.rand(count, 1, 8, 8) - 0.5
        for image in range(first, first + count):
            if image == 4:
                x0[image - first] = np.nan
        return objective(model, x0)

    report = NanReport.find(state, forward, [(0, 3), (3, 3)])
    assert (report.phase, report.where, report.images, report.every) == ("forward", "input", (4,), False)


@pytest.mark.parametrize("kind", NETWORKS)
def test_weights_have_a_digest_in_every_network(kind):
    model = build_model(parse_spec({k: v() for k, v in KINDS.items()}, NETWORKS[kind]), 3)
    before = weights_digest(model)
    with torch.no_grad():
        list(model.parameters())[-1].add_(1)
    assert weights_digest(model) != before


def test_guesses_of_latents_are_not_clipped_to_the_range_of_pixels(on_latents, monkeypatch):
    drawn = []
    monkeypatch.setattr("unfog.pipeline.latents._LatentMap.decode", lambda autoencoder, x0: drawn.append(x0) or x0)
    assert on_latents.config.sampler.clip
    on_latents.sample(8)  # the network answers next to nothing, so that noise as loud as it was is what comes out
    assert float(drawn[0].abs().max()) > 1.5


def test_known_pixels_stay_and_the_rest_is_drawn_from_their_latents(on_latents, photos):
    pixels = np.asarray(Image.open(photos / "a" / "000.png"))
    mask = halves()
    painted = on_latents.sample(3, image=pixels, mask=mask, repeats=2)
    assert (painted[:, :7] == pixels[:7]).all()
    assert (painted[:, 7:] != pixels[7:]).any(axis=(1, 2, 3)).all()
    # With nothing drawn what comes back is the image as its codec brings it.
    autoencoder = open_run_autoencoder(on_latents.config, CPU)
    x = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None] / 127.5 - 1
    with torch.no_grad():
        expected = BYTES.to_stored(autoencoder.decode(autoencoder.encode(x)))[0].permute(1, 2, 0).numpy()
    back = on_latents.sample(1, image=pixels, strength=0.0)[0]
    assert np.abs(back.astype(int) - expected.astype(int)).max() <= 1
    # A latent is known where all of its pixels are: those of rows 4 to 7 are not, as row 7 is to be painted.
    edit = ImageMap.of(on_latents.config, CPU).encode_edit(build_edit(on_latents.config, pixels, mask, None, None))
    assert edit.unknown.tolist() == [[[row > 0] * 4 for row in range(4)]]
    with torch.no_grad():
        latents = on_latents.config.representation.normalise.forward(autoencoder.encode(x))[0]
    torch.testing.assert_close(edit.image, latents)


def test_held_out_images_are_measured_as_latents_and_bits_are_refused(on_latents, capsys):
    found = on_latents.evaluate("held_out")
    recorded = [
        row["held_out_loss"] for row in read_metrics(on_latents.path / "metrics.jsonl") if "held_out_loss" in row
    ]
    assert found.measured[0].value == pytest.approx(recorded[-1], rel=1e-5)
    with pytest.raises(RequestError, match="bits are of pixels"):
        on_latents.evaluate("bits")
    prepared = images_of(on_latents)
    x0 = build_held_out_set(prepared, on_latents.config, CPU).x0
    assert x0.shape[1:] == (3, 4, 4)
    stored = torch.from_numpy(np.array(prepared.as_network_input.held_out.pixels))
    torch.testing.assert_close(x0, without_augmentation(on_latents.config)(stored))


def test_a_learned_variance_counts_in_bits(photos, autoencoder, tmp_path):
    run = trained(tmp_path / "run", photos, autoencoder, "dit", "pixels", "learned", steps=1)
    with torch.no_grad():
        for parameter in run.network.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    held_out = build_held_out_set(images_of(run), run.config, CPU, 4)
    found = bits_per_value(run, held_out, held_out, 4, 0, lambda done: None)
    assert "down to a share of noise of" in found.note

    def by_hand(variance):
        denoise = Denoiser(run.network, run.config.diffusion, variance)
        noise = NoiseSource(0, range(4), (3, 16, 16)).draw
        with torch.no_grad():
            guess = lambda x, logsnr: denoise(x, logsnr, held_out.conditions)  # noqa: E731
            return float(bits_per_dim(guess, run.config.diffusion, held_out.x0, LEVELS, noise).mean())

    assert found.value == pytest.approx(by_hand(True), rel=1e-5)
    assert abs(by_hand(False) / by_hand(True) - 1) > 1e-3


def test_a_learned_variance_is_sampled_with_from_an_image_and_with_a_guide(photos, autoencoder, tmp_path):
    run = trained(tmp_path / "run", photos, autoencoder, "dit", "pixels", "learned", steps=2)
    how = {"n": 2, "sampler": "ddpm", "steps": 4, "label": range(2)}
    plain = run.sample(guidance=1, **how)
    image = np.zeros(plain.shape[1:], np.uint8)
    assert np.array_equal(run.sample(guidance=1, image=image, strength=1.0, **how), plain)
    with torch.no_grad():
        last = list(run.network.parameters())[-1]
        last += torch.linspace(-1, 1, len(last)).reshape(-1, *[1] * (last.ndim - 1))  # which tells the halves apart
    other = Run(run.path, step=0)
    denoiser, weaker = Denoiser(run.network, run.config.diffusion, True), Denoiser(other.network, run.config.diffusion)
    led = run.sample(guidance=2, guide=other, **how)
    x, level = torch.randn(2, plain.shape[3], *plain.shape[1:3]), torch.zeros(2)
    asked, own = Autoguided(denoiser, weaker, 2)(x, level, NO_CONDITIONS), denoiser(x, level)
    assert torch.equal(asked[:, x.shape[1] :], own[:, x.shape[1] :])
    assert led.shape == plain.shape


def test_a_guide_sees_the_same_latents(on_latents):
    config = on_latents.config
    check_guide(config, config)
    loud = replace(config, diffusion=replace(config.diffusion, sigma_data=1.0))
    other = replace(config, latents=replace(config.latents, mean=(0.0, 0.0, 0.0)))
    for guide in (replace(config, autoencoder_folder=""), loud, other):
        with pytest.raises(RequestError, match="trained on the same kind of input"):
            check_guide(config, guide)
    plain = replace(config, autoencoder_folder="")
    zero = Diffusion(path=VP(), schedule=Cosine(steps=100, zero_terminal=True), target=V())
    asked = replace(plain, diffusion=zero)
    eps = replace(plain, diffusion=Diffusion(path=VP(), schedule=Cosine(), target=Eps()))
    with pytest.raises(RequestError, match=r"guide .*noise levels"):
        check_guide(asked, eps)
    check_guide(asked, asked)
    check_guide(
        plain, replace(loud, autoencoder_folder="")
    )  # pixels are pixels whatever deviation they are taken to have


def test_tuned_on_latents(on_latents, monkeypatch):
    monkeypatch.setattr("unfog.inference.tune._MANY_STEPS", 8)
    found = unfog.tune(on_latents.path, steps=2, pictures=2, tries=2, store=False, device="cpu")
    assert found.reference < min(found.errors.values())


def test_starting_from_weights_that_know_latents(on_latents, photos, autoencoder, tmp_path):
    half = tmp_path / "half"
    half.mkdir()
    for path in sorted((photos / "a").iterdir())[:30]:
        (half / path.name).write_bytes(path.read_bytes())
    settings = {k: v for k, v in SETTINGS.items() if k != "size"}
    run = unfog.train(half, out=tmp_path / "run", init=str(on_latents.path), **settings | {"data": {"held_out": 0}})
    assert run.config.latents == on_latents.config.latents  # of other images, which have others of their own
    assert run.config.network == on_latents.config.network
    assert (run.path / "codec" / "codec.safetensors").is_file()
    other = str(random_autoencoder(tmp_path / "other", seed=1).folder)
    with pytest.raises(RequestError, match="trained on latents of another autoencoder"):
        unfog.train(photos, out=tmp_path / "no", init=str(on_latents.path), codec=other, **settings)
    pixels = trained(tmp_path / "pixels", photos, autoencoder, "unet", "pixels", "plain", steps=1)
    with pytest.raises(RequestError, match="trained on pixels"):
        unfog.train(photos, out=tmp_path / "no", init=str(pixels.path), codec=autoencoder, **SETTINGS)
    with pytest.raises(RequestError, match="no learned variance"):
        unfog.train(photos, out=tmp_path / "no", init=str(pixels.path), **settings | LEARNED)
    shutil.copytree(Path(autoencoder), tmp_path / "trainer" / "codec")
    of_autoencoder = replace(pixels.config, autoencoder=Autoencoder(factor=4, latent_channels=3, channels=(8, 8)))
    RunFolder(tmp_path / "trainer").write_config(of_autoencoder)
    with pytest.raises(RequestError, match=r"trains an autoencoder.*--autoencoder"):
        unfog.train(photos, out=tmp_path / "no", init=str(tmp_path / "trainer"), **settings)
    assert not (tmp_path / "no").exists()


def test_loud_latents_are_no_divergence():
    """An answer of 0 loses no more than `reference` says, also where latents are made louder than pixels can be."""
    diffusion, x0 = Diffusion(schedule=Cosine(), target=X0(), sigma_data=3.0), torch.randn(64, 4, 8, 8) * 3
    loss = Objective(diffusion)(lambda x, c_noise, conditions: torch.zeros_like(x), x0)
    assert float(loss.per_image.sum() / loss.null_loss.sum()) == pytest.approx(1.0, abs=0.1)
    assert Normalise((0.0,), (1.0,), 3.0).forward(torch.ones(1, 1, 1, 1)).item() == 3.0
