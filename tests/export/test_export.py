"""Exports of a run: loaded without Unfog, by the code that docs/export.md shows, they give the samples of the run."""

import ast
import inspect
import json
import re
import sys
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import forked
import unfog
from conftest import FEW_PICTURES, few_images
from random_weights import randomized
from unfog.config.presets import preset
from unfog.config.schema import Config
from unfog.data.settings import Data
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.noise import VP, Cosine, FlowUniform, Linear, NoiseSource
from unfog.diffusion.sampler import Sampler
from unfog.diffusion.target import V
from unfog.errors import RequestError, RunError
from unfog.export import graphs, values_numpy
from unfog.inference import export as exporting
from unfog.inference.exports import description as export_description
from unfog.inference.exports import diffusers as exporting_diffusers
from unfog.inference.run import Run
from unfog.models.autoencoder import AutoencoderModel
from unfog.models.autoencoder_settings import Autoencoder
from unfog.models.network_settings import CustomNetwork
from unfog.models.settings import DiT, MPUNet, UNet
from unfog.pipeline.build import build_network
from unfog.pipeline.generate import GenerationSettings, conditional_denoiser
from unfog.pipeline.latents import apply_autoencoder_settings, save_autoencoder
from unfog.values.conditions import Conditions

CPU, COUNT = torch.device("cpu"), 3
UNET = UNet(channels=(8, 16), attention=(False, True), norm_groups=4, head_channels=8)
MPUNET = MPUNet(channels=(8, 16), attention=(False, True), head_channels=8)
DIT = DiT(width=32, depth=1, head_channels=8)
SHIFTED = replace(preset("default").diffusion, schedule=FlowUniform(shift=2.0))
TERMINAL = replace(preset("ddpm").diffusion, schedule=Cosine(zero_terminal=True), target=V())
LINEAR = replace(preset("ddpm").diffusion, schedule=Linear(steps=500), target=V())
ON_VP = replace(preset("default").diffusion, path=VP(), target=V())
CONTINUOUS = replace(preset("ddpm").diffusion, schedule=Cosine(steps=0), target=V())
LEARNED = replace(preset("ddpm").diffusion, learned_variance=True)
AUGMENTED = Data(size=8, channels=3, augment=0.2)
WIDE = Data(size="16x8", channels=3)
DOCS = Path(__file__).parents[2] / "docs" / "export.md"


class Untrained(Run):
    """A run without a folder, whose random weights all matter."""

    def __init__(self, config: Config):
        self.config, self.weights, self.ema, self.device = config, "ema", None, CPU
        self.folder, self.checkpoint = SimpleNamespace(path=Path("photos")), SimpleNamespace(step=7)
        self.step = 7
        with torch.no_grad():
            self.network = randomized(build_network(config).eval())


def run_of(name: str = "default", network=UNET, classes: int = 3, **changes) -> Untrained:
    config = preset(name)
    data = replace(config.data, size=8, channels=3)
    sampler = replace(config.sampler, steps=6)
    names = tuple(f"class {i}" for i in range(classes))
    return Untrained(
        replace(config, **{"data": data, "network": network, "classes": names, "sampler": sampler} | changes)
    )


def latent_run(folder: Path, kind: str, **changes) -> Untrained:
    """A run on latents of one of our autoencoders, or of diffusers' AutoencoderKL."""
    torch.manual_seed(0)
    if kind == "ours":
        network = AutoencoderModel(Autoencoder(factor=2, latent_channels=4, channels=(8,)), 3)
        with torch.no_grad():
            save_autoencoder(folder, randomized(network).eval())
    else:
        from diffusers import AutoencoderKL

        AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
            layers_per_block=1,
        ).save_pretrained(folder)
    config = preset("default")
    config = replace(
        config,
        autoencoder_folder=str(folder),
        data=replace(config.data, size=16, channels=3),
        sampler=replace(config.sampler, steps=4),
        **{"network": UNET} | changes,
    )
    config = apply_autoencoder_settings(config)
    latents = replace(config.latents, mean=(0.1, 0.0, -0.1, 0.2), deviation=(0.5, 1.0, 1.5, 2.0))
    return Untrained(replace(config, latents=latents))


def inputs(run: Run) -> tuple[torch.Tensor, torch.Tensor | None]:
    noise = NoiseSource(0, range(COUNT), run.config.input_shape).draw()
    return noise, torch.arange(COUNT) % len(run.classes) if run.classes else None


@torch.inference_mode()
def drawn(run: Run, draw=None) -> torch.Tensor:
    """Samples of a run as its own code draws them, before they become uint8."""
    config, (_, label) = run.config, inputs(run)
    settings = GenerationSettings.default(config, COUNT, COUNT)
    denoise = conditional_denoiser(Denoiser(run.network, config.diffusion), config, settings, Conditions.of(label))
    sampler = config.representation.sampler(config.sampler)
    draw = draw or NoiseSource(0, range(COUNT), config.input_shape).draw
    return run.decode(sampler(denoise, config.diffusion.path, config.diffusion.schedule, draw))


def shown(name: str) -> SimpleNamespace:
    """The code that the documentation shows for a format."""
    code = re.search(rf"<!-- code: {name} -->\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
    found: dict = {}
    exec(compile(code, f"{DOCS.name}, {name}", "exec"), found)
    return SimpleNamespace(**found, lines=len([line for line in code.splitlines() if line.strip()]))


def run_card_code(folder: Path, size: tuple[int, int]) -> dict:
    """Run the code that the model card of an export shows, check its image, and return its variables."""
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    code = code.replace("FOLDER", str(folder))
    if "diffusers" in code:  # its default needs accelerate, as it says itself
        code = code.replace(f'{folder}"', f'{folder}", low_cpu_mem_usage=False')
    found: dict = {}
    with chdir(folder.parent):
        exec(compile(code, "README.md", "exec"), found)
        # Values that are no pictures are written as an array.
        if Path("samples.npy").exists():
            assert np.load("samples.npy").shape[1:3] == size[::-1]
        else:
            assert Image.open("sample.png").size == size
    return found


MAPPED = Data(
    size=8,
    channels=4,
    dtype="float32",
    map="log,standard,arcsinh,minmax",
    map_values=(0.5, 2.0, 1.5, 1.0, -3000.0, 500.0, 12.0, 0.5, 2.0, 1.0, 1e-4, 3e-5),
)
DEEP = Data(size=8, channels=2, dtype="uint16", range=(0.0, 4095.0))


def check_values(run: Run, maps, values) -> None:
    """Compare the functions of an export with the map of the run, on samples and far beyond them."""
    ours = run.config.image_format.values
    x0 = torch.cat([drawn(run), 10 * torch.randn(COUNT, *run.config.input_shape)])
    stored = maps["to_stored"](values, x0)
    assert torch.equal(stored, ours.to_units(x0))
    whole = maps["rounded"](values, stored)
    assert whole.dtype == ours.torch_type
    assert torch.equal(whole, ours.to_stored(x0))
    assert torch.equal(maps["to_model"](values, whole), ours.to_model(whole))
    torch.testing.assert_close(maps["to_model"](values, stored), x0, atol=1e-3, rtol=1e-3)


def test_a_map_that_exports_do_not_have_is_refused(tmp_path, monkeypatch):
    run = run_of(classes=0, data=MAPPED)
    monkeypatch.setattr(values_numpy, "MAPS", values_numpy.MAPS[:-1])
    with pytest.raises(RequestError, match=r"the map arcsinh is not part of exports.*value-map\.md.*--format run"):
        run.export(tmp_path / "out", format="denoiser")


@pytest.mark.parametrize("data", [MAPPED, DEEP], ids=["mapped", "uint16"])
def test_an_export_carries_the_value_map(tmp_path, data):
    run = run_of(network=DIT, classes=0, data=data)
    run.export(tmp_path / "out")
    model = json.loads((tmp_path / "out/model.json").read_text())
    check_values(run, run_path(str(tmp_path / "out/values.py")), model["values"])
    found = run_card_code(tmp_path / "out", (8, 8))
    drawn_by_card = np.load(tmp_path / "samples.npy")
    assert drawn_by_card.dtype == data.dtype
    assert np.array_equal(drawn_by_card, run.config.image_format.to_pictures(found["x"]))


@pytest.mark.parametrize("kind", ["safetensors", "denoiser"])
def test_an_export_with_another_map_leaves_nothing(tmp_path, monkeypatch, kind):
    run, real = run_of(network=DIT, classes=0, data=MAPPED), exporting.describe_model

    def described(*args):
        model = real(*args)
        model["values"]["maps"][1]["half"] *= 1.001
        return model

    for module in (exporting, export_description):
        monkeypatch.setattr(module, "describe_model", described)
    with pytest.raises(RunError, match="differs from that of the run"):
        run.export(tmp_path / "out", format=kind)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("network", [UNET, MPUNET, DIT], ids=lambda network: network.kind)
@pytest.mark.parametrize("name", ["default", "ddpm", "edm"])
def test_some_thirty_lines_draw_the_samples_of_a_safetensors_export(tmp_path, name, network):
    run = run_of(name, network, 0 if name == "ddpm" else 3)
    run.config = replace(
        run.config, sampler=replace(run.config.sampler, kind="ddim" if name == "edm" else run.config.sampler.kind)
    )
    run.export(tmp_path / "out")
    code = shown("safetensors")
    noise, label = inputs(run)
    samples = code.sample(*code.load(tmp_path / "out"), noise, label)
    expected = drawn(run)
    assert expected.std() > 0.1
    assert (samples - expected).abs().max() < 1e-3
    assert code.lines <= 37
    assert "unfog" not in re.sub(r'""".*?"""', "", (tmp_path / "out/network.py").read_text(), flags=re.DOTALL)


SEAMLESS = Data(size="16x8", channels=3, wrap="x")


@pytest.mark.parametrize("network", [UNET, MPUNET, DIT], ids=lambda network: network.kind)
@pytest.mark.slow
def test_a_safetensors_export_keeps_the_edges_joined(tmp_path, network):
    run = run_of(network=network, data=SEAMLESS)
    run.export(tmp_path / "out")
    code = shown("safetensors")
    model, rebuilt = code.load(tmp_path / "out")
    noise, label = inputs(run)
    samples = code.sample(model, rebuilt, noise, label)
    assert (samples - drawn(run)).abs().max() < 1e-3
    assert (code.sample(model, rebuilt, noise.roll(6, 3), label) - samples.roll(6, 3)).abs().max() < 1e-3
    assert (code.sample(model, rebuilt, noise.roll(2, 2), label) - samples.roll(2, 2)).abs().max() > 1e-2
    assert "| seamless along | x |" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("network", [UNET, MPUNET, DIT], ids=lambda network: network.kind)
@pytest.mark.slow
def test_a_safetensors_export_of_wide_images_draws_them(tmp_path, network):
    run = run_of(network=network, data=WIDE)
    run.export(tmp_path / "out")
    code = shown("safetensors")
    samples = code.sample(*code.load(tmp_path / "out"), *inputs(run))
    assert samples.shape == (COUNT, 3, 8, 16)
    assert (samples - drawn(run)).abs().max() < 1e-3
    run_card_code(tmp_path / "out", (16, 8))


# As few blocks as have every operation: tracing takes seconds of them. Two cases have a value map too.
ONE_BLOCK = replace(UNET, channels=(8,), attention=(True,), mid_attention=False)
PLAIN = Data(size=8, channels=3)
GRAPHS = {
    "unet": ("default", replace(UNET, mid_attention=False), 3, PLAIN),
    "mpunet": ("edm", replace(MPUNET, channels=(8,), attention=(True,)), 3, PLAIN),
    "dit": ("default", DIT, 0, MAPPED),
    "wide": ("default", ONE_BLOCK, 0, WIDE),
    "seamless": ("ddpm", ONE_BLOCK, 0, replace(DEEP, size="16x8", wrap="x")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.exhaustive] * (name not in ("dit", "seamless")))
        for name, case in GRAPHS.items()
    ],
)
def test_forty_lines_of_numpy_draw_the_samples_of_an_onnx_export(tmp_path, case):
    *settings, data = case
    run = run_of(*settings, data=data)
    run.export(tmp_path / "out", format="onnx")
    code = shown("onnx")
    noise, label = (x if x is None else x.numpy() for x in inputs(run))
    samples = torch.from_numpy(code.sample(*code.load(tmp_path / "out"), noise, label))
    expected = drawn(run)
    assert samples.dtype == expected.dtype
    assert (samples - expected).abs().max() < 1e-3
    assert code.lines <= 43
    _, height, width = run.config.input_shape
    found = run_card_code(tmp_path / "out", (width, height))
    if data.dtype in ("float32", "uint16"):  # its values are stored beside the pictures
        stored, by_card = run.config.image_format.to_pictures(torch.from_numpy(found["x"])), tmp_path / "samples.npy"
        assert np.load(by_card).dtype == data.dtype
        np.testing.assert_allclose(np.load(by_card), stored, rtol=1e-5, atol=1e-4 * np.abs(stored).min())


DIFFUSERS = {
    "default": ("default", UNET, 3, {}, "DPMSolverMultistepScheduler"),
    "default, no classes": ("default", UNET, 0, {}, "DPMSolverMultistepScheduler"),
    "default, ddim": ("default", UNET, 3, {"sampler": Sampler("ddim", 6)}, "DPMSolverMultistepScheduler"),
    "default, karras": ("default", UNET, 3, {"sampler": Sampler("dpmpp", 6, "karras")}, "LevelsScheduler"),
    "default, last level": ("default", UNET, 3, {"sampler": Sampler("dpmpp", 6, last=0.02)}, "LevelsScheduler"),
    "edm, last level": ("edm", UNET, 0, {"sampler": Sampler("heun", 8, last=0.01)}, "LevelsScheduler"),
    "default, shifted": ("default", UNET, 3, {"diffusion": SHIFTED}, "DPMSolverMultistepScheduler"),
    "demo": ("demo", UNET, 3, {}, "DPMSolverMultistepScheduler"),
    "ddpm": ("ddpm", UNET, 0, {}, "DPMSolverMultistepScheduler"),
    "ddpm, dpmpp, linear": (
        "ddpm",
        UNET,
        0,
        {"sampler": Sampler("dpmpp", 6), "diffusion": LINEAR},
        "DPMSolverMultistepScheduler",
    ),
    "ddpm, classes": ("ddpm", UNET, 3, {"sampler": Sampler("dpmpp", 6)}, "DPMSolverMultistepScheduler"),
    "ddpm, random": ("ddpm", UNET, 0, {"sampler": Sampler("ddpm", 8)}, "DDPMScheduler"),
    "ddpm, random, classes": ("ddpm", UNET, 3, {"sampler": Sampler("ddpm", 8)}, "DDPMScheduler"),
    "default, unipc": ("default", UNET, 3, {"sampler": Sampler("unipc", 6)}, "UniPCMultistepScheduler"),
    "ddpm, unipc": ("ddpm", UNET, 0, {"sampler": Sampler("unipc", 6, order=3)}, "UniPCMultistepScheduler"),
    "default, sde": ("default", UNET, 3, {"sampler": Sampler("dpmpp-sde", 6)}, "DPMSolverMultistepScheduler"),
    "ddpm, sde": ("ddpm", UNET, 0, {"sampler": Sampler("dpmpp-sde", 6)}, "DPMSolverMultistepScheduler"),
    "ddpm, heun": ("ddpm", UNET, 3, {"sampler": Sampler("heun", 6)}, "LevelsScheduler"),
    "zero terminal": ("ddpm", UNET, 3, {"diffusion": TERMINAL}, "LevelsScheduler"),
    "edm": ("edm", UNET, 3, {}, "LevelsScheduler"),
    "on vp": (
        "default",
        UNET,
        3,
        {"diffusion": ON_VP, "sampler": Sampler("heun", 6, "logsnr")},
        "LevelsScheduler",
    ),
    "continuous": ("ddpm", UNET, 0, {"diffusion": CONTINUOUS}, "LevelsScheduler"),
    "learned variance": ("ddpm", UNET, 3, {"diffusion": LEARNED}, "DPMSolverMultistepScheduler"),
    "time scale": ("edm", replace(UNET, time_scale=50.0), 0, {}, "LevelsScheduler"),
    "augmented": ("default", DIT, 0, {"data": AUGMENTED}, "DPMSolverMultistepScheduler"),
    "edm, mpunet": ("edm", MPUNET, 3, {}, "LevelsScheduler"),
    "default, dit": ("default", DIT, 3, {}, "DPMSolverMultistepScheduler"),
    "wide": ("ddpm", UNET, 0, {"data": WIDE}, "DPMSolverMultistepScheduler"),
    "wide, mpunet": ("edm", MPUNET, 3, {"data": WIDE}, "LevelsScheduler"),
    "wide, dit": ("default", DIT, 3, {"data": WIDE}, "DPMSolverMultistepScheduler"),
    "seamless, dit": ("default", DIT, 3, {"data": SEAMLESS}, "DPMSolverMultistepScheduler"),
    "seamless": ("ddpm", replace(UNET, time_scale=50.0), 0, {"data": SEAMLESS}, "DPMSolverMultistepScheduler"),
}


SAME_AS_OTHERS = (
    "default, no classes",
    "default, ddim",
    "demo",
    "ddpm, classes",
    "ddpm, random, classes",
    "time scale",
    "wide, mpunet",
    "wide, dit",
)
"""Cases whose settings are all covered by other cases."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.exhaustive] * (name in SAME_AS_OTHERS))
        for name, case in DIFFUSERS.items()
    ],
)
@pytest.mark.slow
def test_a_pipeline_of_diffusers_draws_the_samples_of_the_run(tmp_path, case):
    name, network, classes, changes, scheduler = case
    run = run_of(name, network, classes, **changes)
    run.export(tmp_path / "out", format="diffusers")
    # UNet2DModel pads with zeros.
    equal = isinstance(network, UNet) and not run.config.data.wrapped
    stock = equal and name == "ddpm" and not classes
    stock = stock and scheduler not in ("LevelsScheduler", "UniPCMultistepScheduler")
    assert (tmp_path / "out/pipeline.py").exists() != stock
    pipeline = check_pipeline(run, tmp_path / "out", trusted=not stock)
    assert type(pipeline.scheduler).__name__ == scheduler
    assert type(pipeline.unet).__name__ == ("UNet2DModel" if equal else "UnfogNetwork")


def check_pipeline(run, folder, trusted=True):
    """Load a pipeline as a person does, compare its images with the run's, and return it."""
    from diffusers import DiffusionPipeline

    for file in folder.rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        imports = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        assert imports
        assert not [line for line in imports if "unfog" in line]
    pipeline = DiffusionPipeline.from_pretrained(folder, trust_remote_code=trusted, low_cpu_mem_usage=False)
    pipeline.set_progress_bar_config(disable=True)
    generators = NoiseSource(0, range(COUNT), run.config.input_shape).generators
    steps = run.config.sampler.steps
    images = pipeline(batch_size=COUNT, generator=generators, num_inference_steps=steps, output_type="np").images
    expected = drawn(run).clamp(-1, 1)
    assert expected.std() > 0.1
    assert (2 * torch.from_numpy(images).permute(0, 3, 1, 2) - 1 - expected).abs().max() < 1e-3
    return pipeline


@pytest.mark.parametrize("kind", ["ours", "AutoencoderKL"])
@pytest.mark.slow
def test_a_pipeline_decodes_latents_with_their_autoencoder(tmp_path, kind):
    run = latent_run(tmp_path / "autoencoder", kind)
    run.export(tmp_path / "out", format="diffusers")
    pipeline = check_pipeline(run, tmp_path / "out")
    assert type(pipeline.vae).__name__ == ("UnfogAutoencoder" if kind == "ours" else kind)


@pytest.mark.slow
def test_a_pt2_export_is_sampled_by_the_same_lines_and_decodes_latents(tmp_path):
    run = latent_run(tmp_path / "autoencoder", "ours", network=DIT)
    run.export(tmp_path / "out", format="pt2")
    x0 = shown("safetensors").sample(*shown("safetensors").load(tmp_path / "out"), inputs(run)[0])
    images = torch.export.load(tmp_path / "out/decoder.pt2").module()(x0)
    assert (images - drawn(run)).abs().max() < 1e-3
    run_card_code(tmp_path / "out", (16, 16))
    run.export(tmp_path / "weights")
    assert {path.name for path in (tmp_path / "weights/autoencoder").iterdir()} == {"config.json", "codec.safetensors"}


@pytest.mark.slow
def test_a_pipeline_takes_classes_steps_and_noise(tmp_path):
    run = run_of()
    run.export(tmp_path / "out", format="diffusers")
    pipeline = check_pipeline(run, tmp_path / "out")
    noise, _ = inputs(run)
    by_noise = pipeline(COUNT, latents=noise, output_type="pt").images
    assert (2 * by_noise - 1 - drawn(run).clamp(-1, 1)).abs().max() < 1e-3
    other = pipeline(COUNT, class_labels=1, latents=noise, num_inference_steps=3, guidance_scale=1.0).images
    assert [image.size for image in other] == [(8, 8)] * COUNT
    with pytest.raises(ValueError, match=r"class_labels = \[9\] .*from 0 to 2"):
        pipeline(1, class_labels=[9])


@pytest.mark.slow
def test_a_list_of_levels_is_for_its_number_of_steps(tmp_path):
    from diffusers.utils import dynamic_modules_utils

    run_of("ddpm", diffusion=TERMINAL).export(tmp_path / "out", format="diffusers", steps=4)
    path, modules = [*sys.path], dynamic_modules_utils.HF_MODULES_CACHE
    pipeline = exporting_diffusers._load(tmp_path / "out", stock=False)
    # The code is not copied to the folder that all processes share, where another pipeline of the name may come.
    assert not Path(inspect.getfile(type(pipeline))).is_relative_to(modules)
    assert (sys.path, dynamic_modules_utils.HF_MODULES_CACHE) == (path, modules)
    assert len(pipeline().images) == 1
    with pytest.raises(ValueError, match=r"for 4 steps.*--steps 5"):
        pipeline(num_inference_steps=5)


REFUSED = {
    "no equivalent of edm": {"sampler": Sampler("edm", 6)},
    "no levels for unipc": {"sampler": Sampler("unipc", 6, "karras")},
    "no equivalent of order 3": {"sampler": Sampler("dpmpp", 6, order=3)},
    "no timesteps": {"sampler": Sampler("ddpm", 6)},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_what_no_pipeline_can_do_is_refused(tmp_path, changes):
    with pytest.raises(RequestError, match=r"equivalent in diffusers.*--sampler ddim"):
        run_of(**changes).export(tmp_path / "out", format="diffusers")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "find_spec", lambda name: None if name == "onnxruntime" else True)
    with pytest.raises(RequestError, match=r"needs onnxruntime: pip install .*\[onnx\]"):
        run_of().export(tmp_path / "out", format="onnx")


def test_a_sampler_without_levels_is_refused(tmp_path):
    with pytest.raises(RequestError, match="adaptive chooses its own noise levels"):
        run_of().export(tmp_path / "out", sampler="adaptive")


@pytest.mark.slow
def test_what_is_written_is_compared_and_an_export_that_differs_leaves_nothing(tmp_path, monkeypatch):
    run = run_of()
    real = exporting.plain_weights
    monkeypatch.setattr(exporting, "plain_weights", lambda network: {k: w * 1.01 for k, w in real(network).items()})
    with pytest.raises(RunError, match="differs from the run by"):
        run.export(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_network_of_other_code_is_refused_with_the_remedy(tmp_path):
    run = run_of()
    run.config = replace(run.config, network=CustomNetwork(path="mine.Net"))
    with pytest.raises(RequestError, match=r"mine\.Net.*--format onnx or pt2 exports its graph$"):
        run.export(tmp_path / "out")
    with pytest.raises(RequestError, match=r"the denoiser is c_skip x \+ c_out y\(c_in x, c_noise\), .* model\.json"):
        run.export(tmp_path / "out", format="denoiser")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_writes_the_ema_or_what_it_is_told(tmp_path):
    kind = "unet:channels=8/8,attention=0/0,mid_attention=0,norm_groups=4"
    settings = {"steps": 2, "size": 8, "network": kind, "device": "cpu", "batch": 8}
    run = unfog.train(few_images(), out=tmp_path / "run", **settings, **FEW_PICTURES)
    written = {}
    for name, words in {"ema": (), "raw": ("--weights", "raw", "--sampler", "ddim", "--steps", "4")}.items():
        done = forked.run(["export", run.path, tmp_path / name, *words])
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(tmp_path / name)
        written[name] = json.loads((tmp_path / name / "model.json").read_text())
    assert written["ema"]["run"] == {"name": "run", "step": 2, "weights": "ema", "ema": None}
    assert written["raw"]["run"]["weights"] == "raw"
    assert written["raw"]["sampler"]["kind"] == "ddim"
    assert len(written["raw"]["levels"]) == 5
    ema, raw = (exporting.load_file(tmp_path / name / "model.safetensors") for name in ("ema", "raw"))
    assert not torch.equal(ema["conv_out.weight"], raw["conv_out.weight"])
    with pytest.raises(RequestError, match="it is not empty; give another OUT"):
        run.export(tmp_path / "ema")


def test_the_page_maps_values_in_both_directions(tmp_path):
    run_of(network=DIT, classes=0).export(tmp_path / "OUT")
    with chdir(tmp_path):
        code = shown("values")
    assert torch.equal(code.stored, torch.full((1, 3, 8, 8), 100, dtype=torch.uint8))
