"""A folder of diffusers without a run: samples like its own pipeline's, and their evaluation against a reference."""

import json

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMPipeline, DDPMScheduler, UNet2DModel
from safetensors.torch import save_file

import unfog
from random_weights import randomized
from unfog.cli.main import main
from unfog.diffusion.noise import NoiseSource
from unfog.errors import RequestError
from unfog.runs.weights.model import Model

pytestmark = pytest.mark.slow
THEIRS = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "attention_head_dim": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}


def _pipeline(folder, scheduler, **changes):
    torch.manual_seed(1)
    with torch.no_grad():
        model = randomized(UNet2DModel(**THEIRS | changes)).eval()
    DDPMPipeline(model, scheduler).save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {"prediction_type": "epsilon"},
        {"prediction_type": "v_prediction", "beta_schedule": "squaredcos_cap_v2"},
        {"prediction_type": "sample", "num_train_timesteps": 500},
        {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
    ],
    ids=["eps", "v-cosine", "x0", "zero-snr"],
)
@torch.no_grad()
def test_samples_are_those_of_the_scheduler_of_diffusers(tmp_path, settings):
    network = _pipeline(tmp_path / "theirs", DDPMScheduler(**settings))
    ours = unfog.load(tmp_path / "theirs").sample(3, sampler="ddim", steps=5, seed=4)
    scheduler = DDIMScheduler(timestep_spacing="trailing", set_alpha_to_one=True, **settings)
    scheduler.set_timesteps(5)
    # Ours starts at the noise level of the last timestep, and diffusers at deviation 1.
    x = NoiseSource(4, range(3), (3, 8, 8)).draw() * (1 - scheduler.alphas_cumprod[-1]).sqrt()
    for t in scheduler.timesteps:
        x = scheduler.step(network(x, t).sample, t, x, use_clipped_model_output=True).prev_sample
    theirs = ((x.clamp(-1, 1) + 1) * 127.5).permute(0, 2, 3, 1).numpy()
    assert np.abs(np.asarray(ours).astype(float) - theirs).max() <= 1.01  # one of 255, by rounding
    assert np.asarray(ours).std() > 10


def test_the_commands_sample_and_evaluate_a_pipeline(tmp_path, capsys):
    _pipeline(tmp_path / "theirs", DDPMScheduler())
    reference = tmp_path / "real.npy"
    np.save(reference, np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8))
    words = ["--steps", "2", "--device", "cpu", "-n", "12", "--out"]
    with pytest.raises(SystemExit) as ended:
        main(["sample", str(tmp_path / "theirs"), *words, str(tmp_path / "samples")])
    assert not ended.value.code
    assert len(list((tmp_path / "samples").glob("0*.png"))) == 12
    compared = ["--reference", str(reference), "--metrics", "sliced,kid", "--features", "pixels"]
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(tmp_path / "theirs"), *words, str(tmp_path / "r.json"), *compared])
    assert not ended.value.code
    found = json.loads((tmp_path / "r.json").read_text())
    images = unfog.evaluate(tmp_path / "samples", reference, "sliced,kid", features="pixels", device="cpu")
    assert [one["value"] for one in found["measured"]] == [one.value for one in images.measured]
    assert found["drawn"]["samples"] == 12
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == ["model_index.json", "scheduler", "unet"]


def test_classes_of_diffusers_are_numbers(tmp_path):
    _pipeline(tmp_path / "theirs", DDPMScheduler(), num_class_embeds=3)
    model = unfog.load(tmp_path / "theirs")
    assert model.classes == ("0", "1", "2")
    pair = (np.asarray(model.sample(1, label=[number], steps=3)) for number in (0, 2))
    assert not np.array_equal(*pair)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample", "--device", "cpu"], "give --out"),
        (["sample", "--out", "x", "--weights", "raw"], "weights needs a run"),
        (["evaluate"], "--reference"),
        (["evaluate", "--reference", "held-out"], "held-out needs a run"),
        (["evaluate", "--reference", "fashion", "--against", "5"], "against needs a run"),
    ],
)
def test_what_needs_a_run_is_refused(tmp_path, words, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main([words[0], str(tmp_path), *words[1:]])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_does_not_map_is_refused_with_the_reason(tmp_path):
    _pipeline(tmp_path / "theirs", DDPMScheduler())
    (tmp_path / "theirs/scheduler/scheduler_config.json").write_text('{"_class_name": "LevelsScheduler"}')
    with pytest.raises(RequestError, match="LevelsScheduler has no equivalent"):
        Model(tmp_path / "theirs")
    (tmp_path / "theirs/scheduler/scheduler_config.json").unlink()
    with pytest.raises(RequestError, match="no scheduler_config"):
        Model(tmp_path / "theirs")
    (tmp_path / "theirs/vae").mkdir()
    _pipeline(tmp_path / "theirs", DDPMScheduler())
    with pytest.raises(RequestError, match="generates latents"):
        Model(tmp_path / "theirs")
    dit = tmp_path / "dit"
    dit.mkdir()
    (dit / "config.json").write_text('{"_class_name": "DiTTransformer2DModel"}')
    save_file({"x": torch.zeros(1)}, dit / "diffusion_pytorch_model.safetensors")
    with pytest.raises(RequestError, match=r"this DiT's weights do not fit its config\.json"):
        Model(dit)
    (dit / "config.json").write_text('{"_class_name": "DiTTransformer2DModel", "activation_fn": "geglu"}')
    with pytest.raises(RequestError, match="activation_fn = 'geglu'"):
        Model(dit)
