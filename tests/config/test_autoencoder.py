"""The autoencoder, what it is trained to, and the folder that others train with."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributions import Normal, kl_divergence

import unfog
from unfog.cli.main import main
from unfog.config.presets import AutoencoderRunSettings, autoencoder_recipe
from unfog.config.resume_rules import walk_settings
from unfog.config.schema import Config
from unfog.errors import RequestError
from unfog.models.autoencoder import AutoencoderModel
from unfog.models.autoencoder_settings import FACTORS, WIDTHS, Autoencoder, AutoencoderFolder, Latents
from unfog.pipeline.latents import (  # the autoencoder itself is compared with another one
    _load_autoencoder,
    save_autoencoder,
)
from unfog.process.run_folder import RunFolder
from unfog.reporting.records import read_metrics
from unfog.runs.resume import resume
from unfog.runs.start import add_autoencoder
from unfog.training.autoencoder_loss import (  # each term of the loss is compared with its equation
    AutoencoderLoss,
    _blur,
    _laplacian_pyramid,
    _standard_normal_kl,
    psnr,
)

pytestmark = pytest.mark.slow

SMALL = Autoencoder(factor=4, latent_channels=3, channels=(8, 16), norm_groups=4)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """120 pictures of a gradient with a disc, in colour."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    y, x = np.mgrid[:16, :16]
    for i in range(120):
        disc = (x - rng.uniform(4, 12)) ** 2 + (y - rng.uniform(4, 12)) ** 2 < rng.uniform(6, 30)
        pixels = np.where(disc[..., None], rng.integers(0, 256, 3), 8 * x[..., None] + 8 * y[..., None])
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:03}.png")
    return folder


def test_divergence_is_that_of_torch_distributions():
    mean, logvar = torch.randn(2, 3, 5, 5), 3 * torch.randn(2, 3, 5, 5)
    expected = kl_divergence(Normal(mean, (0.5 * logvar).exp()), Normal(0.0, 1.0))
    torch.testing.assert_close(_standard_normal_kl(mean, logvar), expected, rtol=1e-5, atol=1e-5)
    assert float(_standard_normal_kl(torch.zeros(1), torch.zeros(1))) == 0


def test_bands_add_up_to_the_image_and_are_linear():
    x, y = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    found, rest = _laplacian_pyramid(x), x
    assert [band.shape[-1] for band in found] == [16, 8, 4]
    for band in found:
        torch.testing.assert_close(rest - band, _blur(rest))
        rest = _blur(rest)[..., ::2, ::2]
    for band, one, other in zip(_laplacian_pyramid(x - y), found, _laplacian_pyramid(y)):
        torch.testing.assert_close(band, one - other)
    flat = torch.full((1, 1, 8, 8), 0.7)
    assert all(
        float(band.abs().max()) < 1e-6 for band in _laplacian_pyramid(flat)
    )  # nothing but what is coarser than all of them
    assert _laplacian_pyramid(torch.randn(1, 1, 3, 3)) == []


def test_loss_is_absolute_error_bands_and_divergence():
    class Known(torch.nn.Module):
        def forward(self, x):
            return x + 0.25, torch.full((len(x), 2, 4, 4), 2.0), torch.zeros(len(x), 2, 4, 4)

    x0 = torch.rand(3, 3, 16, 16) - 0.5
    loss = AutoencoderLoss(kl=0.5, pyramid=7.0)(Known(), x0)
    # A constant error has no bands; a mean of 2 at unit variance diverges by 2.
    torch.testing.assert_close(loss.per_image, torch.full((3,), 0.25 + 0.5 * 2.0), rtol=1e-5, atol=1e-5)
    nothing = AutoencoderLoss(kl=0.0, pyramid=7.0)
    torch.testing.assert_close(loss.null_loss, nothing.reconstruction(x0))
    plain = x0.abs().mean((1, 2, 3)) + 7 * sum(band.abs().mean((1, 2, 3)) for band in _laplacian_pyramid(x0))
    torch.testing.assert_close(loss.null_loss, plain)


def test_psnr_by_its_definition():
    x = torch.randint(0, 200, (2, 3, 8, 8), dtype=torch.uint8)
    assert psnr(x, x + 10).tolist() == pytest.approx([20 * math.log10(255 / 10)] * 2)
    assert psnr(x, x).tolist() == pytest.approx([20 * math.log10(255 / 0.5)] * 2)


def test_latents_are_drawn_about_their_mean():
    torch.manual_seed(0)
    network = AutoencoderModel(SMALL, 3)
    x = torch.rand(2, 3, 16, 16) * 2 - 1
    mean, logvar = network.posterior(x)
    assert mean.shape == logvar.shape == (2, 3, 4, 4)
    torch.manual_seed(5)
    image, *_ = network(x)
    torch.manual_seed(5)
    latent = Normal(mean, (logvar / 2).exp()).rsample()
    torch.testing.assert_close(image, network.decode(latent))
    with torch.no_grad():
        network.encoder[-1].bias[SMALL.latent_channels :] = -60.0  # log variances, where they are cut off
    torch.testing.assert_close(network(x)[0], network.decode(network.encode(x)), rtol=0, atol=1e-4)
    assert float(network.posterior(x)[1].detach().min()) == -30.0


@pytest.mark.parametrize("factor", [2, 4, 8, 16])
@pytest.mark.parametrize("image_channels", [1, 3])
def test_every_factor_gives_images_of_the_size_they_had(factor, image_channels):
    settings = Autoencoder(factor=factor, channels=(8,) * (factor.bit_length() - 1), norm_groups=4)
    network = AutoencoderModel(settings, image_channels)
    x = torch.rand(1, image_channels, 2 * factor, 3 * factor)
    assert network.encode(x).shape == (1, 4, 2, 3)
    assert network.decode(network.encode(x)).shape == x.shape


def test_what_makes_no_autoencoder_is_refused():
    for settings in (
        {"factor": 3},
        {"factor": 4, "channels": (8,)},
        {"channels": (8,)},
        {"factor": 2, "channels": (9,)},
        {"latent_channels": 0},
        {"kl": -1.0},
    ):
        with pytest.raises(RequestError, match=" = "):
            Autoencoder(**settings)
    for settings in ({"mean": (0.0,)}, {"channels": 1, "deviation": (0.0,)}, {"factor": -1}):
        with pytest.raises(RequestError, match=" = "):
            Latents(**settings)
    for wrong in ({"width": "huge"}, {"factor": 5}):
        with pytest.raises(RequestError, match=r"is unknown|is not one of"):
            add_autoencoder(autoencoder_recipe(), **wrong)
    for width in WIDTHS:
        for factor in FACTORS:
            assert add_autoencoder(autoencoder_recipe(), factor, width=width).autoencoder.factor == factor


def test_help_shows_what_an_autoencoder_reads_and_no_more(capsys):
    names, all_names = (
        {name for name, *_ in walk_settings(each)}
        for each in (AutoencoderRunSettings.of(autoencoder_recipe()), Config())
    )
    assert names < all_names
    with pytest.raises(SystemExit):
        main(["train-autoencoder", "--help-all"])
    said = capsys.readouterr().out
    flags = set(re.findall(r"^\W+?--([a-z.-]+)", said, re.MULTILINE))
    assert {"ema", "size", "lr", "evaluate.every", "evaluate.images", "preview.images"} < flags
    for name in (
        "diffusion",
        "sampler",
        "init",
        "guidance",
        "network",
        "autoencoder-folder",
        "label-dropout",
        "preset",
    ):
        assert not any(flag == name or flag.startswith(f"{name}.") for flag in flags), name
    assert {flag for flag in flags if flag.startswith("evaluate.")} == {"evaluate.every", "evaluate.images"}


@pytest.mark.parametrize(
    "flags",
    [
        *(
            "--weighting edm",
            "--schedule linear",
            "--sampler.steps 3",
            "--preset edm",
            "--network tiny",
            "--guidance 2",
        ),
        *("--evaluate.metrics kid", "--evaluate.levels 3", "--init x", "--autoencoder x", "--label-dropout 0.2"),
    ],
)
def test_flags_that_mean_nothing_to_an_autoencoder_are_refused_in_a_line_that_names_train(flags, capsys):
    with pytest.raises(SystemExit) as left:
        main(["train-autoencoder", "fashion", *flags.split()])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"unfog: --[\w.-]+ is not a flag of unfog train-autoencoder, but of unfog train, .*\n", said)


def test_settings_that_mean_nothing_to_an_autoencoder_are_refused_from_python_and_from_a_file(tmp_path, capsys):
    for settings, name in (
        ({"weighting": "edm"}, "diffusion"),
        ({"sampler": {"steps": 3}}, "sampler"),
        ({"network": "tiny"}, "network"),
        ({"codec": "x"}, "autoencoder_folder"),
        ({"evaluate": {"metrics": ["kid"]}}, "evaluate.metrics"),
    ):
        with pytest.raises(RequestError, match=f"{name} is a setting of unfog train"):
            unfog.train_autoencoder("fashion", **settings)
    (tmp_path / "recipe.toml").write_text("guidance = 2.0\n")
    with pytest.raises(SystemExit):
        main(["train-autoencoder", "fashion", "--config", str(tmp_path / "recipe.toml")])
    assert "guidance is a setting of unfog train" in capsys.readouterr().err
    read = {"ema": "power:width=0.2", "evaluate": {"images": 7}, "lr": 1e-4, "data": {"jitter": 0.1}}
    with pytest.raises(RequestError, match="nowhere"):  # which says that nothing else was wrong
        unfog.train_autoencoder(str(tmp_path / "nowhere"), **read)


def test_an_autoencoder_is_the_same_once_written_and_read(tmp_path):
    torch.manual_seed(0)
    network = AutoencoderModel(SMALL, 1)
    described = save_autoencoder(tmp_path / "codec", network)
    assert (described.factor, described.channels, described.image_channels) == (4, 3, 1)
    assert AutoencoderFolder.open(str(tmp_path)) == described  # a run folder, where it lies in codec/
    x = torch.rand(2, 1, 8, 8)
    read = _load_autoencoder(described, torch.device("cpu"))
    assert torch.equal(read.encode(x), network.encode(x))
    assert torch.equal(read.decode(network.encode(x)), network.decode(network.encode(x)))
    before = described.sha256()
    with torch.no_grad():
        network.decoder[0].bias[0] += 1e-3
    assert save_autoencoder(tmp_path / "codec", network).sha256() != before


def test_an_autoencoder_is_replaced_when_the_other_is_whole(tmp_path, monkeypatch):
    torch.manual_seed(0)
    first = save_autoencoder(tmp_path / "codec", AutoencoderModel(SMALL, 3)).sha256()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("unfog.pipeline.latents.sync", killed)
        with pytest.raises(KeyboardInterrupt):
            save_autoencoder(tmp_path / "codec", AutoencoderModel(SMALL, 3))
    assert AutoencoderFolder.open(str(tmp_path / "codec")).sha256() == first
    assert save_autoencoder(tmp_path / "codec", AutoencoderModel(SMALL, 3)).sha256() != first
    assert [path.name for path in tmp_path.iterdir()] == ["codec"]


def test_folders_that_hold_no_autoencoder_are_refused(tmp_path):
    with pytest.raises(RequestError, match=r"holds no config\.json"):
        AutoencoderFolder.open(str(tmp_path))
    for text, said in (
        ("[]", "not a small JSON object"),
        ("{", "cannot be used"),
        ('{"_class_name": "UNet2DModel"}', "not one of"),
        ('{"_class_name": ["x"]}', "cannot be used"),
        ('{"_class_name": "AutoencoderKL", "in_channels": 3, "out_channels": 4}', "differ"),
        ('{"_class_name": "AutoencoderKL", "block_out_channels": 5}', "cannot be used"),
        ('{"_class_name": "AutoencoderKL", "latent_channels": 100000}', "latent channels 100000"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(RequestError, match=said):
            AutoencoderFolder.open(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL", "block_out_channels": [8, 8]}))
    (tmp_path / "diffusion_pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(RequestError, match=r"diffusion_pytorch_model\.bin is a pickle"):
        AutoencoderFolder.open(str(tmp_path))


def tiny_autoencoder(photos, out, steps, **settings):
    usual = {
        "data": {"held_out": 0.2},
        "precision": "fp32",
        "device": "cpu",
        "batch": 8,
        "size": 16,
        "evaluate": {"every": 8, "images": 24, "levels": 1},
        "preview": {"every": -1, "images": 8},
        "checkpoint": {"every": 8},
        "log": {"every": 8},
    }
    return unfog.train_autoencoder(photos, out=out, width="tiny", steps=steps, **(usual | settings))


def test_training_brings_images_back_and_goes_on_to_the_bit(photos, tmp_path):
    whole = tiny_autoencoder(photos, tmp_path / "whole", 32)
    rows = [row for row in read_metrics(whole / "metrics.jsonl") if "psnr" in row]
    assert [row["step"] for row in rows] == [0, 8, 16, 24, 32]
    assert rows[-1]["psnr"] > rows[0]["psnr"] + 3
    assert rows[-1]["held_out_loss"] < 0.7 * rows[0]["held_out_loss"]
    for folder in ("samples", "reconstructions"):
        assert list((whole / folder).glob("*.png"))
    # From the checkpoint at step 16, as if it had been stopped there.
    for step in ("00000024", "00000032"):
        for path in sorted((whole / "checkpoints" / step).iterdir()):
            path.unlink()
        (whole / "checkpoints" / step).rmdir()
    before = {path.name: path.read_bytes() for path in (whole / "codec").iterdir()}
    _, done = resume(RunFolder(whole))
    assert done
    assert {path.name: path.read_bytes() for path in (whole / "codec").iterdir()} == before
    shutil.rmtree(whole / "codec")  # as where it was killed behind its last checkpoint
    resume(RunFolder(whole))
    assert {path.name: path.read_bytes() for path in (whole / "codec").iterdir()} == before
    with pytest.raises(RequestError, match="trains an autoencoder, which generates nothing"):
        unfog.load(whole)
    with pytest.raises(RequestError, match="trains an autoencoder"):
        unfog.doctor(whole)
