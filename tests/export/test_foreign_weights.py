"""Weights of other programs, from their files: sampled, measured, trained on, exported; and what is refused."""

import json

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from safetensors.torch import load_file, save_file

import unfog
from random_weights import randomized
from test_export import run_of, shown
from test_foreign_networks import SHAPES, converted, references
from unfog.cli.main import main
from unfog.cli.read_request import read_request
from unfog.config.spec_strings import format_spec
from unfog.diffusion.noise import NoiseSource
from unfog.diffusion.objective import Objective
from unfog.diffusion.weighting import MinSnr, Snr
from unfog.errors import RequestError
from unfog.export.foreign_weights import from_dit, read_model
from unfog.inference.run import Run
from unfog.models.network_settings import build_model
from unfog.models.settings import DdpmPytorch, DiffusersDiT, Edm, Edm2
from unfog.values.condition_format import ConditionFormat

QUICK = {"device": "cpu", "precision": "fp32", "batch": 4, "steps": 1, "preview": {"images": 1}}
QUICK |= {"evaluate": {"every": -1}, "sampler": {"steps": 4}}


def sigmoid_buffers(steps=40, objective="v", gamma=None):
    """The buffers that GaussianDiffusion registers, by its formulas (Jabri et al. 2022, fig. 8; Hang et al. 2023)."""
    t = torch.linspace(-3, 3, steps + 1, dtype=torch.float64)
    kept = (torch.sigmoid(-t) - torch.sigmoid(torch.tensor(-3.0)).double()) / (2 * torch.sigmoid(torch.tensor(3.0)) - 1)
    kept = kept / kept[0]
    betas = (1 - kept[1:] / kept[:-1]).clip(0, 0.999)
    kept = (1 - betas).cumprod(0)
    snr = kept / (1 - kept)
    clipped = snr if gamma is None else snr.clamp(max=gamma)
    weight = {"noise": clipped / snr, "x0": clipped, "v": clipped / (snr + 1)}[objective]
    return {"betas": betas.float(), "loss_weight": weight.float(), "alphas_cumprod": kept.float()}


def checkpoint(path, buffers, case="ddpm"):
    """A checkpoint as the trainer of denoising-diffusion-pytorch writes it; the raw weights are others."""
    weights = references.weights(SHAPES[case])
    ema = {f"ema_model.model.{name}": tensor for name, tensor in weights.items()}
    ema |= {f"online_model.model.{name}": tensor + 1 for name, tensor in weights.items()}
    ema |= {f"{part}.{name}": tensor for part in ("ema_model", "online_model") for name, tensor in buffers.items()}
    raw = {f"model.{name}": tensor + 1 for name, tensor in weights.items()} | buffers
    stored = {"step": 7, "model": raw, "ema": ema | {"initted": torch.tensor(True), "step": torch.tensor(7)}}
    torch.save(stored | {"opt": {"state": {0: {"step": 7}}}, "scaler": None, "version": "2.3.4"}, path)
    return path


@pytest.mark.slow
@torch.no_grad()
def test_samples_of_a_checkpoint_are_those_of_its_noise_levels_and_objective(tmp_path):
    buffers = sigmoid_buffers(gamma=5)
    model = unfog.load(checkpoint(tmp_path / "model-1.pt", buffers), size=8)
    ours = np.asarray(model.sample(2, sampler="ddim", steps=4, seed=3)).astype(float)
    _, network = converted(tmp_path, "ddpm")
    scheduler = DDIMScheduler(
        trained_betas=buffers["betas"].tolist(),
        num_train_timesteps=40,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
    )
    scheduler.set_timesteps(4)
    x = NoiseSource(3, range(2), (3, 8, 8)).draw() * (1 - scheduler.alphas_cumprod[-1]).sqrt()
    for t in scheduler.timesteps:
        x = scheduler.step(network(x, t.repeat(2)), t, x, use_clipped_model_output=True).prev_sample
    theirs = ((x.clamp(-1, 1) + 1) * 127.5).permute(0, 2, 3, 1).numpy()
    assert theirs.std() > 10
    assert np.abs(ours - theirs).max() <= 1.01  # one of 255, by rounding


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "gamma"), [("noise", None), ("x0", 5), ("v", None), ("noise", 5)])
def test_the_objective_of_a_checkpoint_is_read_off_its_loss_weights(tmp_path, objective, gamma):
    model = unfog.load(checkpoint(tmp_path / "m.pt", sigmoid_buffers(25, objective, gamma)), size=8)
    diffusion = model.config.diffusion
    assert diffusion.target.kind == {"noise": "eps"}.get(objective, objective)
    assert format_spec(diffusion.schedule) == "sigmoid:steps=25"


def loss_of_the_program(buffers, objective, output, x0, noise, t):
    """The loss of GaussianDiffusion.p_losses (2.3.4) for a network's output: mean square times `loss_weight[t]`."""
    kept = buffers["alphas_cumprod"][t].view(-1, 1, 1, 1)
    target = {"noise": noise, "x0": x0, "v": kept.sqrt() * noise - (1 - kept).sqrt() * x0}[objective]
    return (output - target).square().mean((1, 2, 3)) * buffers["loss_weight"][t]


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [None, 5, 2.5])
@pytest.mark.parametrize("objective", ["noise", "x0", "v"])
def test_training_goes_on_with_the_loss_of_the_program(tmp_path, objective, gamma):
    buffers = sigmoid_buffers(25, objective, gamma)
    diffusion = unfog.load(checkpoint(tmp_path / "m.pt", buffers), size=8).config.diffusion
    generator = torch.Generator().manual_seed(0)
    x0, noise, output = (torch.randn(25, 3, 8, 8, generator=generator) for _ in range(3))
    t = torch.arange(25)
    found = Objective(diffusion)(lambda *inputs: output, x0.clamp(-1, 1), u=(t + 0.5) / 25, noise=noise)
    expected = loss_of_the_program(buffers, objective, output, x0.clamp(-1, 1), noise, t)
    torch.testing.assert_close(found.per_image, expected, rtol=2e-3, atol=1e-6)
    if gamma is not None:
        assert diffusion.weighting == MinSnr(gamma)


@pytest.mark.slow
def test_unknown_loss_weights_of_a_checkpoint_are_refused_until_the_objective_is_given(tmp_path):
    buffers = sigmoid_buffers(25, "v")
    buffers["loss_weight"][:5] *= 0.5
    path = checkpoint(tmp_path / "m.pt", buffers)
    with pytest.raises(RequestError, match=r"loss weights in this checkpoint .* --target"):
        unfog.load(path, size=8)
    words = ["fashion", "--init", str(path), "--path", "vp", "--schedule", "sigmoid:steps=25", "--target", "v"]
    assert read_request("train", words).settings.diffusion.target.kind == "v"


def test_weights_alone_are_of_the_usual_objective_which_is_said_and_can_be_changed(tmp_path, capsys):
    save_file(references.weights(SHAPES["ddpm"]), tmp_path / "unet.safetensors")
    model = unfog.load(tmp_path / "unet.safetensors", size=8)
    assert "the program's defaults" in capsys.readouterr().err
    assert (model.config.diffusion.target.kind, model.config.diffusion.schedule.kind) == ("v", "sigmoid")
    assert model.config.diffusion.weighting == Snr()  # as the program has it unless min_snr_loss_weight is given
    words = ["fashion", "--init", str(tmp_path / "unet.safetensors"), "--target", "eps", "--schedule", "cosine"]
    changed = read_request("train", words).settings.diffusion
    assert (changed.target.kind, changed.schedule.kind) == ("eps", "cosine")


@pytest.mark.slow
def test_a_guide_of_a_model_is_used_or_refused(tmp_path):
    model = unfog.load(checkpoint(tmp_path / "m.pt", sigmoid_buffers()), size=8)
    with pytest.raises(RequestError, match="is not a run"):  # its own earlier average, which no file of weights has
        model.evaluate("sliced", n=10, guide="auto", reference="fashion", features="texture")
    with pytest.raises(RequestError, match="no effect without a guide"):
        model.evaluate("sliced", n=10, guide_every=3, reference="fashion", features="texture")


@pytest.mark.slow
def test_a_size_is_asked_for_where_the_weights_do_not_tell_it(tmp_path):
    path = checkpoint(tmp_path / "m.pt", sigmoid_buffers())
    with pytest.raises(RequestError, match="states no size: give --size"):
        unfog.load(path)
    with pytest.raises(RequestError, match="size = 9 must be a multiple of 2"):
        unfog.load(path, size=9)
    save_file(references.weights(SHAPES["ddpmpp"]), tmp_path / "edm.safetensors")
    with pytest.raises(RequestError, match="states 8; omit it"):
        unfog.load(tmp_path / "edm.safetensors", size=16)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ncsnpp", "adm, classes", "edm2, classes"])
def test_edm_weights_sample_by_its_sampler_at_its_noise_levels(tmp_path, case):
    weights = {f"model.{name}": tensor for name, tensor in references.weights(SHAPES[case]).items()}
    save_file(weights, tmp_path / "edm.safetensors")
    model = unfog.load(tmp_path / "edm.safetensors")
    assert (model.config.sampler.kind, model.config.sampler.steps) == ("heun", 18)
    assert model.config.diffusion.schedule.mean == (-0.4 if "edm2" in case else -1.2)
    samples = model.sample(2, steps=4, label=[1] if model.classes else ())
    assert samples.shape == (2, 8, 8, 3)
    assert np.asarray(samples).std() > 10
    assert model.classes == (("0", "1", "2") if "classes" in case else ())


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    file = tmp_path_factory.mktemp("photos") / "photos.npz"
    images = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), np.uint8)
    np.savez(file, images=images, labels=np.array(["ant", "bee", "cat"] * 8))
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("ddpm", marks=pytest.mark.exhaustive),
        "edm2, classes",
        pytest.param("ncsnpp", marks=pytest.mark.exhaustive),
        pytest.param("adm, classes", marks=pytest.mark.exhaustive),
    ],
)
def test_training_goes_on_resumes_and_exports(tmp_path, photos, case):
    save_file(references.weights(SHAPES[case]), tmp_path / "w.safetensors")
    kind = read_model(tmp_path / "w.safetensors")
    settings = {"init": str(tmp_path / "w.safetensors"), "lr": 1e-30, "size": 8, **QUICK}
    settings |= {"data": {"labels": "none"}} if case == "ncsnpp" else {}  # the classes of ddpm are new
    unfog.train(str(photos), out=tmp_path / "run", **settings)
    trained = load_file(tmp_path / "run/checkpoints/00000001/model.safetensors")
    fixed = kind.network.fixed_norm_weights
    for name, tensor in kind.state.items():
        row = tensor.float().flatten(1).square().mean(1).sqrt() if tensor.ndim > 1 else None
        scaled = fixed and tensor.ndim > 1 and "class" not in name
        expected = tensor.float() / (row.view(-1, *[1] * (tensor.ndim - 1)) + 1e-4) if scaled else tensor.float()
        assert torch.allclose(trained[name], expected, atol=1e-4), name
    run = unfog.resume(tmp_path / "run", steps=2)
    assert run.checkpoint.step == 2
    assert run.classes == (() if case == "ncsnpp" else ("ant", "bee", "cat"))
    run.export(tmp_path / "out", sampler="ddim", steps=2)
    code = shown("safetensors")
    model, network = code.load(tmp_path / "out")
    label = torch.tensor([0]) if model["classes"] else None
    assert code.sample(model, network, references.sines("noise", (1, *model["input"])), label).isfinite().all()
    run.export(tmp_path / "pipeline", format="diffusers", sampler="ddim", steps=2)


DIT = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 8, "num_layers": 2}
DIT |= {"sample_size": 4, "num_embeds_ada_norm": 3}


@torch.no_grad()
def dit_pipeline(folder, shared=True):
    torch.manual_seed(0)
    with torch.no_grad():
        network = randomized(DiTTransformer2DModel(**DIT)).eval()
        if shared:
            first, *others = network.transformer_blocks
            for block in others:
                block.norm1.emb.load_state_dict(first.norm1.emb.state_dict())
        vae = AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
            layers_per_block=1,
            scaling_factor=0.3,
        )
    pipeline = DiTPipeline(network, randomized(vae).eval(), DDIMScheduler())
    pipeline.save_pretrained(folder)
    return pipeline


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "block"])
@torch.no_grad()
def test_a_dit_of_diffusers_gives_its_outputs(tmp_path, shared):
    theirs = dit_pipeline(tmp_path, shared).transformer.eval()
    model = from_dit(theirs.config, theirs.state_dict())
    assert model.network.embeddings == ("shared" if shared else "block")
    network = build_model(model.network, model.channels, ConditionFormat.numbered(model.classes), 8).eval()
    network.load_state_dict(model.state)
    x, t, label = references.sines("x", (3, 4, 4, 4), 1.5), torch.tensor([3.0, 400.0, 999.0]), torch.tensor([0, 2, 3])
    expected = theirs(x, t, class_labels=label).sample
    assert expected.std() > 0.05
    assert (network(x, t, label) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.slow
@torch.no_grad()
def test_a_dit_pipeline_samples_through_its_own_autoencoder(tmp_path):
    pipeline = dit_pipeline(tmp_path / "dit")
    model = unfog.load(tmp_path / "dit")
    assert (model.config.data.size, model.config.diffusion.learned_variance, model.classes) == (
        8,
        True,
        ("0", "1", "2"),
    )
    ours = np.asarray(model.sample(2, sampler="ddim", steps=3, seed=1, label=[2], guidance=2.0)).astype(float)
    scheduler = DDIMScheduler(timestep_spacing="trailing", set_alpha_to_one=True, clip_sample=False)
    scheduler.set_timesteps(3)
    x = NoiseSource(1, range(2), (4, 4, 4)).draw() * (1 - scheduler.alphas_cumprod[-1]).sqrt()
    for t in scheduler.timesteps:
        both = pipeline.transformer(torch.cat([x, x]), t.repeat(4), class_labels=torch.tensor([2, 2, 3, 3])).sample
        with_class, without = both[:, :4].chunk(2)
        x = scheduler.step(without + 2 * (with_class - without), t, x).prev_sample
    images = pipeline.vae.decode(x / 0.3).sample
    theirs = ((images.clamp(-1, 1) + 1) * 127.5).permute(0, 2, 3, 1).numpy()
    assert theirs.std() > 3
    assert np.abs(ours - theirs).max() <= 1.01


@pytest.mark.slow
def test_training_goes_on_from_a_dit_pipeline_at_the_scale_of_its_latents(tmp_path, photos):
    dit_pipeline(tmp_path / "dit")
    run = unfog.train(str(photos), out=tmp_path / "run", init=str(tmp_path / "dit"), size=8, **QUICK)
    assert run.config.latents.deviation == pytest.approx((0.5 / 0.3,) * 4)
    assert run.classes == ("ant", "bee", "cat")
    assert Run(tmp_path / "run").sample(1).shape == (1, 8, 8, 3)


def changed(case, change):
    weights = references.weights(SHAPES[case])
    change(weights)
    return weights


REFUSED = {
    "old version": (changed("ddpm", lambda w: w.pop("mid_attn.mem_kv")), "a version before 2"),
    "fourier": (changed("ddpm", lambda w: w.update({"time_mlp.0.weights": torch.ones(4)})), "Fourier features"),
    "self-conditioned": (
        changed("ddpm", lambda w: w.update({"init_conv.weight": torch.ones(8, 6, 7, 7)})),
        "self-conditioned",
    ),
    "skip": (changed("ddpmpp", lambda w: w.update({"model.enc.4x4_aux_skip.weight": torch.ones(2)})), "kind `skip`"),
    "iddpm": (changed("adm", lambda w: w.update({"u": torch.ones(9)})), "preconditioned as iDDPM"),
    "filter": (
        changed("ddpmpp", lambda w: w.update({"model.enc.4x4_down.conv0.resample_filter": torch.ones(1, 1, 4, 4)})),
        "resampling filter has 4 values",
    ),
    "half": (changed("edm2", lambda w: w.pop("unet.enc.4x4_block0.conv_res1.weight")), "looks like EDM2's U-Net"),
    "unknown": ({"something.weight": torch.zeros(2)}, "no network that is known here"),
}


@pytest.mark.parametrize(("weights", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_map_is_refused_with_the_reason(tmp_path, weights, reason):
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(RequestError, match=reason):
        unfog.load(tmp_path / "w.safetensors", size=8)


@pytest.mark.slow
def test_noise_levels_of_no_known_schedule_are_refused_until_the_objective_is_given(tmp_path):
    path = checkpoint(tmp_path / "m.pt", sigmoid_buffers() | {"betas": torch.linspace(0.1, 0.2, 40)})
    words = ["fashion", "--init", str(path), "--target", "v"]
    with pytest.raises(RequestError, match="no schedule with its usual settings"):
        read_request("train", words)
    given = read_request("train", [*words, "--schedule", "linear", "--path", "vp"]).settings.diffusion
    assert given.schedule.kind == "linear"


@pytest.mark.slow
def test_the_commands_take_a_file(tmp_path, capsys):
    path = checkpoint(tmp_path / "model-1.pt", sigmoid_buffers())
    np.save(tmp_path / "real.npy", np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8))
    words = ["--steps", "2", "--device", "cpu", "-n", "10", "--size", "8"]
    for command in (
        ["sample", "--out", str(tmp_path / "out")],
        ["evaluate", "--reference", str(tmp_path / "real.npy")],
    ):
        more = ["--metrics", "kid", "--features", "pixels", "--out", str(tmp_path / "r.json")]
        with pytest.raises(SystemExit) as ended:
            main([command[0], str(path), *command[1:], *words, *(more if command[0] == "evaluate" else [])])
        assert not ended.value.code, capsys.readouterr().err
    assert len(list((tmp_path / "out").glob("0*.png"))) == 10
    assert json.loads((tmp_path / "r.json").read_text())["measured"][0]["n"] == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "network",
    [
        DdpmPytorch(width=8, mults=(1, 2), attention=(False, True), heads=2, head_channels=4),
        pytest.param(DiffusersDiT(width=24, depth=1, head_channels=12), marks=pytest.mark.exhaustive),
        pytest.param(Edm("ncsnpp", 8, (1, 2), 1, (False, True)), marks=pytest.mark.exhaustive),
        pytest.param(Edm2(64, (1,), 1, (True,)), marks=pytest.mark.exhaustive),
    ],
    ids=lambda network: network.kind,
)
@pytest.mark.exhaustive
def test_graphs_take_any_number_of_images(tmp_path, network):
    run = run_of("ddpm", network, 0)
    run.export(tmp_path / "out", format="pt2")
    assert run.export_difference < 1e-5
