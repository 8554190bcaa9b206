"""Starting from trained weights: those of a run, and of a UNet2DModel that diffusers wrote."""

import json
import shutil

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from safetensors.torch import load_file, save_file

import unfog
from conftest import TRANSFORMER
from random_weights import randomized
from unfog.cli.read_request import read_request
from unfog.config.schema import Config
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VP, Cosine, Flow, Linear
from unfog.diffusion.target import FlowVelocity, V
from unfog.errors import RequestError
from unfog.export.diffusers_unet import Network
from unfog.inference.run import Run
from unfog.models.settings import UNet
from unfog.models.unet import UNetModel
from unfog.planning.lr_range_test import LrTestSetup
from unfog.reporting.records import read_events
from unfog.runs.weights.foreign_objectives import objective_from_scheduler
from unfog.runs.weights.init_weights import recipe_from_weights
from unfog.values.condition_format import ConditionFormat

pytestmark = pytest.mark.slow

QUICK = {
    "device": "cpu",
    "precision": "fp32",
    "batch": 8,
    "steps": 1,
    "preview": {"images": 2},
    "evaluate": {"every": -1},
    "sampler": {"steps": 2},
}
THEIRS = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "attention_head_dim": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Twelve pictures of 8 x 8 in each of three classes."""
    import numpy as np
    from PIL import Image

    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name in ("ant", "bee", "cat"):
        (root / name).mkdir()
        for i in range(12):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(root / name / f"{i}.png")
    return root


def written(folder, scheduler=None, **changes):
    """A UNet2DModel of random weights that matter, written by diffusers."""
    torch.manual_seed(1)
    with torch.no_grad():
        model = randomized(UNet2DModel(**THEIRS | changes)).eval()
    if scheduler is None:
        model.save_pretrained(folder)
    else:
        DDPMPipeline(model, scheduler).save_pretrained(folder)
    return model


@pytest.mark.parametrize(("size", "seen"), [(8, 8), ([8, 8], 8), ([8, 16], "16x8"), ([[8]], 0), ([], 0), ("8", 0)])
def test_a_size_of_any_form_is_taken_or_left(tmp_path, size, seen):
    written(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sample_size": size}))
    assert recipe_from_weights(Config(), {"init": {"folder": str(tmp_path)}}).data.size == seen


def test_weights_of_latents_ask_for_their_autoencoder(photos, tmp_path):
    written(tmp_path / "theirs", in_channels=4, out_channels=4)
    with pytest.raises(RequestError, match=r"generates latents of 4 channels, and .* 3; .*--autoencoder"):
        unfog.train(photos, out=tmp_path / "run", init=tmp_path / "theirs", data={"labels": "none"}, **QUICK)
    assert not (tmp_path / "run").exists()


@torch.no_grad()
def difference(run, model, label=None, their_label=None):
    """Of the answers of a run's network and of a UNet2DModel."""
    generator = torch.Generator().manual_seed(2)
    x, t = torch.randn(3, 3, 8, 8, generator=generator), torch.tensor([0.0, 300.0, 999.0])
    theirs = model(x, t, class_labels=label if their_label is None else their_label).sample
    return float((run.network(x, t, label) - theirs).abs().max() / theirs.abs().max())


def events(run, name):
    return [e["value"] + ": " + e["reason"] for e in read_events(run.path / "events.jsonl") if e.get("name") == name]


def test_pipeline_of_diffusers(photos, tmp_path):
    scheduler = DDPMScheduler(500, prediction_type="v_prediction")
    model = written(tmp_path / "theirs", scheduler)
    started = unfog.train(photos, out=tmp_path / "run", init=tmp_path / "theirs", data={"labels": "none"}, **QUICK)
    for weights in ("ema", "raw"):
        assert difference(Run(tmp_path / "run", weights, step=0), model) < 1e-5
    diffusion = started.config.diffusion
    assert (diffusion.path, diffusion.target) == (VP(), V())
    alpha, sigma = diffusion.path(diffusion.schedule.table())
    assert torch.allclose(alpha.square(), scheduler.alphas_cumprod.double(), atol=1e-6)
    assert torch.allclose(alpha.square() + sigma.square(), torch.ones(500).double())
    assert events(started, "objective") == [
        "vp, linear:steps=500,beta_start=5e-05,beta_end=0.01, v: as its scheduler_config.json says"
    ]
    assert "0.3 of" in events(started, "optimizer.lr")[0]
    assert len(started.config.init.sha256) == 64
    assert started.config.data.size == 8


def test_what_unfog_exports_and_names_of_old(photos, tmp_path):
    folder = tmp_path / "ours"
    folder.mkdir()
    settings = UNet((8, 16), attention=(False, True), head_channels=8, norm_groups=4)
    with torch.no_grad():
        network = randomized(UNetModel(settings, 3, ConditionFormat.numbered(3)))
    config, state = Network(network.settings, 3, 3, network.state_dict()).to_unet2d(8)
    (folder / "config.json").write_text(json.dumps(config))
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    for new, name in old.items():
        state = {k.replace(f".{new}.", f".{name}.") if ".attentions." in k else k: v for k, v in state.items()}
    assert any("proj_attn" in key for key in state)
    save_file({key: value.contiguous() for key, value in state.items()}, folder / WEIGHTS)
    run = unfog.train(photos, out=tmp_path / "run", init=str(folder), **QUICK)
    assert run.classes == ("ant", "bee", "cat")
    first = Run(tmp_path / "run", step=0).network
    assert all(torch.equal(v, first.state_dict()[k]) for k, v in network.state_dict().items())
    assert events(run, "objective")[0].startswith("flow")


def test_classes_of_others_begin_as_none(photos, tmp_path):
    model = written(tmp_path / "five", num_class_embeds=5)
    run = unfog.train(photos, out=tmp_path / "run", init=tmp_path / "five", **QUICK)
    assert "new" in events(run, "classes")[0]
    table = Run(tmp_path / "run", step=0).network.class_embedding.weight.detach()
    mean = model.class_embedding.weight.detach().mean(0)
    assert table.shape[0] == 4
    # Around it, by a little, although classes of a fresh network begin with deviation 1.
    assert float((table - mean).abs().max()) < 0.1
    assert float((table - mean).std()) == pytest.approx(0.02, rel=0.2)
    same = written(tmp_path / "three", num_class_embeds=3)
    unfog.train(photos, out=tmp_path / "same", init=tmp_path / "three", **QUICK)
    label = torch.tensor([0, 1, 2])
    assert difference(Run(tmp_path / "same", step=0), same, label) < 1e-5


def test_run_to_run_with_and_without_classes(photos, tmp_path):
    settings = QUICK | {"network": TRANSFORMER, "steps": 3, "lr": 1e-2, "checkpoint": {"every": 1}}
    old = unfog.train(photos, out=tmp_path / "old", size=8, **settings)
    new = unfog.train(photos, out=tmp_path / "new", init=tmp_path / "old", **QUICK)
    assert new.config.network == old.config.network
    assert new.config.diffusion == old.config.diffusion
    assert events(new, "size") == ["8: as it was trained with; --size WIDTHxHEIGHT takes another"]
    first = Run(tmp_path / "new", step=0).network.state_dict()
    assert all(torch.equal(value, first[name]) for name, value in old.network.state_dict().items())
    raw = {"folder": str(tmp_path / "old"), "weights": "raw", "checkpoint": "2"}
    plain = unfog.train(photos, out=tmp_path / "plain", init=raw, data={"labels": "none"}, **QUICK)
    assert plain.classes == ()
    before = Run(tmp_path / "old", "raw", step=2).network
    x, t = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([10.0, 700.0])
    with torch.no_grad():
        gap = Run(tmp_path / "plain", "raw", step=0).network(x, t) - before(x, t, torch.tensor([3, 3]))
    assert float(gap.abs().max()) < 1e-5
    assert float(before(x, t, torch.tensor([3, 3])).abs().max()) > 1e-3


def test_a_search_for_a_rate_begins_with_the_weights(photos, tmp_path, monkeypatch):

    old = unfog.train(photos, out=tmp_path / "old", size=8, **QUICK | {"network": TRANSFORMER, "lr": 1e-2})
    search, subjects = LrTestSetup.run, []
    monkeypatch.setattr(LrTestSetup, "run", lambda subject, s: subjects.append(subject) or search(subject, s))
    unfog.find_lr(photos, init=tmp_path / "old", seconds=1e-3, **QUICK)
    begun = subjects[0].fresh().model.state_dict()
    assert all(torch.equal(value, begun[name]) for name, value in old.network.state_dict().items())


def test_resume_does_without_the_folder_and_is_the_same(photos, tmp_path):
    written(tmp_path / "theirs")
    settings = QUICK | {"steps": 4, "checkpoint": {"every": 2, "keep": 9}}
    whole = unfog.train(photos, out=tmp_path / "whole", init=tmp_path / "theirs", **settings)
    shutil.copytree(whole.path, tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "00000004")
    shutil.rmtree(tmp_path / "theirs")
    unfog.resume(tmp_path / "part")
    for name in ("model", "ema", "optimizer"):
        one, other = (
            load_file(tmp_path / run / "checkpoints/00000004" / f"{name}.safetensors") for run in ("whole", "part")
        )
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_nothing_saved_yet_needs_the_same_weights(photos, tmp_path):
    written(tmp_path / "theirs")
    run = unfog.train(photos, out=tmp_path / "run", init=tmp_path / "theirs", **QUICK)
    for path in [run.path / "metrics.jsonl", *run.folder.checkpoints.iterdir()]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    weights = tmp_path / "theirs" / WEIGHTS
    before = weights.read_bytes()
    save_file({key: value + 1 for key, value in load_file(weights).items()}, weights)
    with pytest.raises(RequestError, match="sha256 differs"):
        unfog.resume(run.path)
    weights.write_bytes(before)
    again = unfog.resume(run.path)
    assert all(torch.equal(value, run.network.state_dict()[k]) for k, value in again.network.state_dict().items())


def test_flags_win_over_the_file_and_that_over_the_weights(photos, tmp_path):
    written(tmp_path / "theirs", DDPMScheduler(200))
    file = tmp_path / "settings.toml"
    start = f'[init]\nfolder = "{tmp_path / "theirs"}"\nsha256 = "0"\n'
    file.write_text(start + '[diffusion]\nsigma_data = 0.25\ntarget = "x0"\n')
    config = read_request("train", [str(photos), "--config", str(file), "--path", "flow"]).settings
    assert (config.diffusion.schedule.steps, config.diffusion.target.kind) == (200, "x0")
    assert (config.diffusion.path.kind, config.diffusion.sigma_data) == ("flow", 0.25)
    assert (config.network.channels, config.data.size, config.init.sha256) == ((8, 16), 8, "")
    assert read_request("train", [str(photos)]).settings.network is None


@pytest.mark.parametrize(
    ("spoil", "changes", "said"),
    [
        (lambda f: shutil.rmtree(f), {}, "is not a folder"),
        (lambda f: None, {"init": "~no-such-user/x"}, "is not a folder"),
        (lambda f: (f / "config.json").unlink(), {}, "it has no config.toml"),
        (lambda f: (f / WEIGHTS).rename(f / "diffusion_pytorch_model.bin"), {}, "pickles"),
        (lambda f: (f / "config.json").write_text("{"), {}, "cannot be read"),
        (lambda f: (f / "config.json").write_text('{"_class_name": "UNet1DModel"}'), {}, "UNet1DModel"),
        (lambda f: None, {"network": "tiny"}, "differs from that of"),
        (lambda f: None, {"data": {"channels": 1}}, "3 channel"),
        (lambda f: None, {"size": 9}, "must be a multiple"),
        (lambda f: None, {"init": {"folder": "{}", "checkpoint": "last"}}, "newest, best or a step"),
    ],
)
def test_refused_with_reason_and_nothing_left(photos, tmp_path, spoil, changes, said):
    folder = tmp_path / "theirs"
    written(folder)
    spoil(folder)
    with pytest.raises(RequestError, match=said):
        unfog.train(photos, out=tmp_path / "run", **{"init": folder} | QUICK | changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("betas", ["linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("steps", [1000, 250])
@pytest.mark.parametrize("zero", [False, True])
def test_schedules_of_diffusers(betas, steps, zero):
    theirs = DDPMScheduler(
        steps, beta_schedule=betas, rescale_betas_zero_snr=zero, prediction_type="v_prediction", beta_end=0.015
    )
    ours = objective_from_scheduler(theirs.config, Diffusion())
    share = ours.path(ours.schedule.table())[0].square()
    # Theirs is in single precision, and its last one is not quite zero.
    assert torch.allclose(share, theirs.alphas_cumprod.double(), atol=2e-6)
    assert isinstance(ours.schedule, Linear if betas == "linear" else Cosine)


def test_schedulers_without_equivalent_unless_the_objective_is_given(photos, tmp_path):
    flow = objective_from_scheduler({"_class_name": "FlowMatchEulerDiscreteScheduler"}, Diffusion())
    assert (flow.path, flow.target) == (Flow(), FlowVelocity())
    for wrong in ({"beta_schedule": "sigmoid"}, {"prediction_type": "flow"}, {"_class_name": "EDMEulerScheduler"}):
        with pytest.raises(RequestError, match="give --path, --schedule and --target"):
            objective_from_scheduler(wrong, Diffusion())
    written(tmp_path / "theirs", DDPMScheduler(beta_schedule="scaled_linear"))
    given = {"path": "vp", "schedule": "cosine", "target": "eps", "out": tmp_path / "run"}
    run = unfog.train(photos, init=tmp_path / "theirs", **given, **QUICK)
    assert events(run, "objective") == ["vp, cosine, eps: as given: that of the folder has no equivalent here"]
