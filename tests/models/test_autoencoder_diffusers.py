"""Codecs of diffusers: the same latents and images as diffusers itself gives."""

import re
import shutil

import pytest
import torch

from unfog.errors import RequestError
from unfog.models.autoencoder_settings import AutoencoderFolder
from unfog.pipeline.latents import _load_autoencoder  # the autoencoder itself is compared with another one

diffusers = pytest.importorskip("diffusers")
CPU = torch.device("cpu")


def kl():
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=4,
        layers_per_block=1,
        scaling_factor=0.3,
    )


def tiny():
    return diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
        latent_channels=3,
    )


@pytest.fixture(scope="module", params=[kl, tiny], ids=["AutoencoderKL", "AutoencoderTiny"])
def saved(request, tmp_path_factory):
    torch.manual_seed(0)
    network = request.param().eval()
    folder = tmp_path_factory.mktemp("diffusers") / "vae"  # as in the folder of a pipeline
    network.save_pretrained(folder, safe_serialization=True)
    return network, folder


@torch.no_grad()
def test_latents_and_images_are_those_of_diffusers(saved):
    network, folder = saved
    described = AutoencoderFolder.open(str(folder.parent))
    assert described.kind == type(network).__name__
    autoencoder = _load_autoencoder(described, CPU)
    x = torch.rand(2, 3, 32, 32) * 2 - 1
    encoded = network.encode(x)
    expected = encoded.latent_dist.mean if hasattr(encoded, "latent_dist") else encoded.latents
    latents = autoencoder.encode(x)
    assert torch.equal(latents, expected)
    assert latents.shape == (2, described.channels, 32 // described.factor, 32 // described.factor)
    assert torch.equal(autoencoder.decode(latents), network.decode(expected).sample)


def test_pickled_weights_and_those_of_another_network_are_refused(saved, tmp_path):
    network, folder = saved
    network.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    with pytest.raises(RequestError, match="is a pickle, which is never read"):
        AutoencoderFolder.open(str(tmp_path / "pickled"))
    other = shutil.copytree(folder, tmp_path / "other")
    text = (other / "config.json").read_text()
    assert '"latent_channels": ' in text
    wrong = text.replace(f'"latent_channels": {network.config.latent_channels}', '"latent_channels": 7')
    (other / "config.json").write_text(wrong)
    with pytest.raises(RequestError, match=r"cannot be read as|do not fit"):
        _load_autoencoder(AutoencoderFolder.open(str(other)), CPU)
    if "norm_num_groups" in text:
        (other / "config.json").write_text(re.sub(r'"norm_num_groups": \d+', '"norm_num_groups": 0', text))
        with pytest.raises(RequestError, match="cannot be read as"):
            _load_autoencoder(AutoencoderFolder.open(str(other)), CPU)
    cut = shutil.copytree(folder, tmp_path / "cut")
    weights = AutoencoderFolder.open(str(cut)).weights
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(RequestError, match="cannot be read as"):
        _load_autoencoder(AutoencoderFolder.open(str(cut)), CPU)


def test_an_autoencoder_that_is_not_what_it_says_is_refused(saved, tmp_path):
    network, folder = saved
    if not isinstance(network, diffusers.AutoencoderKL):
        pytest.skip("its levels and its weights must agree to be read at all")
    described = AutoencoderFolder.open(str(folder))
    with pytest.raises(RequestError, match="not usable"):
        _load_autoencoder(described._replace(factor=4), CPU)
