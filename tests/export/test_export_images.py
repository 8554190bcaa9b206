"""Exports of runs whose conditions are images: loaded without Unfog, they give what the run gives for these images."""

import json
import re
from dataclasses import replace
from runpy import run_path

import numpy as np
import pytest
import torch
from PIL import Image

from test_export import COUNT, CPU, DIT, MPUNET, UNET, inputs, run_card_code, run_of, shown
from unfog.data.settings import Data
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.noise import NoiseSource
from unfog.inference.exports.conditions import describe_columns, example_picture
from unfog.pipeline.generate import GenerationSettings, conditional_denoiser
from unfog.pipeline.given_images import read_pictures
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.kinds.image_kinds import picture_of

H, W = 8, 16
COLUMNS = (
    ColumnFacts("age", "number", statistics=(50.0, 20.0, 20.0, 89.0)),
    ColumnFacts("degrade", "degrade", statistics=(3.0, H, W, 2.0)),
    ColumnFacts("depth", "image", statistics=(1.0, H, W, -5.0, 20.0)),
    ColumnFacts("grey", "grey", statistics=(1.0, H, W)),
    ColumnFacts("hole", "hole", statistics=(3.0, H, W)),
    ColumnFacts("mask", "mask", ("0", "3", "255"), (1.0, H, W)),
    ColumnFacts("sketch", "image", statistics=(3.0, H, W, 0.0, 0.0, 0.0, 255.0, 255.0, 255.0)),
)
IMAGES = COLUMNS[1:]
PAINTED = (ColumnFacts("areas", "mask", ("#000000", "#00ff7f"), (1.0, H, W)),)
PICTURES = Data(size=f"{W}x{H}", channels=3)
MAPPED = Data(
    size=f"{W}x{H}",
    channels=2,
    dtype="float32",
    map="log,arcsinh",
    map_values=(0.5, 2.0, 1.5, 12.0, 0.5, 2.0),
)


def with_images(network=DIT, classes=3, columns=COLUMNS, data=PICTURES, **changes):
    return run_of(network=network, classes=classes, columns=columns, data=data, guidance=2.0, **changes)


def of_values():
    """A run on values of two channels, with a map of each."""
    columns = (
        ColumnFacts("degrade", "degrade", statistics=(2.0, H, W, 2.0)),
        ColumnFacts("grey", "grey", statistics=(1.0, H, W)),
        ColumnFacts("hole", "hole", statistics=(2.0, H, W)),
    )
    return with_images(classes=0, columns=columns, data=MAPPED)


def given_of(run) -> dict:
    """An image for each condition, then none, then another."""
    given = {one.name: example_picture(run.config, one) for one in run.config.columns if one.kind != "number"}
    return {name: [image, None, image[::-1]] for name, image in given.items()}


@torch.inference_mode()
def drawn(run, given) -> torch.Tensor:
    """Samples of a run as `unfog sample` draws them."""
    config = run.config
    asked = config.conditions.parse(read_pictures(config, given, COUNT))
    settings = replace(GenerationSettings.default(config, COUNT, COUNT), given=asked)
    conditions = settings.conditions(config, range(COUNT), CPU)
    denoise = conditional_denoiser(Denoiser(run.network, config.diffusion), config, settings, conditions)
    draw = NoiseSource(0, range(COUNT), config.input_shape).draw
    return run.decode(config.sampler(denoise, config.diffusion.path, config.diffusion.schedule, draw))


def difference(found, expected) -> float:
    return float((torch.as_tensor(found) - expected).abs().max())


def write_pictures(run, folder) -> None:
    """Write the files that the code of a model card opens."""
    for name, (image, *_) in given_of(run).items():
        np.save(folder / f"{name}.npy", image)
        if image.dtype == np.uint8:
            Image.fromarray(image.squeeze()).save(folder / f"{name}.png")


@pytest.mark.parametrize("network", [UNET, MPUNET, DIT], ids=lambda network: network.kind)
@pytest.mark.slow
def test_a_safetensors_export_draws_what_the_run_draws_from_images(tmp_path, network):
    run = with_images(network)
    run.export(tmp_path / "out")
    code, given = shown("safetensors"), given_of(run)
    model, rebuilt = code.load(tmp_path / "out")
    read = run_path(str(tmp_path / "out/given.py"))["read"]
    columns = read(model["conditions"], given, COUNT)
    noise, label = inputs(run)
    samples = code.sample(model, rebuilt, noise, label, columns)
    assert difference(samples, drawn(run, given)) < 1e-3
    # Each image counts.
    for i in range(1, len(columns)):
        other = [*columns]
        other[i] = other[i][::-1].copy()
        assert difference(code.sample(model, rebuilt, noise, label, other), samples) > 1e-3
    for name in ("network.py", "given.py", "sample.py"):
        assert "unfog" not in re.sub(r'""".*?"""', "", (tmp_path / "out" / name).read_text(), flags=re.DOTALL)
    write_pictures(run, tmp_path)
    run_card_code(tmp_path / "out", (W, H))
    card = (tmp_path / "out/README.md").read_text()
    assert "| mask | mask | 16x8, 3 labels: 0, 3, 255 |" in card
    assert 'Image.open("mask.png")' in card
    assert 'np.load("depth.npy")' in card


@pytest.mark.parametrize("format", ["onnx", pytest.param("pt2", marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_a_graph_has_an_input_for_each_image(tmp_path, format):
    run = with_images()
    run.export(tmp_path / "out", format=format)
    given, (noise, label) = given_of(run), inputs(run)
    model = json.loads((tmp_path / "out/model.json").read_text())
    columns = run_path(str(tmp_path / "out/given.py"))["read"](model["conditions"], given, COUNT)
    if format == "pt2":
        code = shown("safetensors")
        samples = code.sample(*code.load(tmp_path / "out"), noise, label, columns)
    else:
        code = shown("onnx")
        model, sessions = code.load(tmp_path / "out")
        samples = code.sample(model, sessions, noise.numpy(), label.numpy(), columns)
        found = {each.name: (each.type, each.shape[1:]) for each in sessions["model"].get_inputs()}
        assert found["mask"] == ("tensor(float)", [1, H, W])
        assert found["sketch"] == ("tensor(float)", [3, H, W])
        assert "mask: float32 \\[B, 1, 8, 16\\]" in (tmp_path / "out/README.md").read_text()
    assert difference(samples, drawn(run, given)) < 1e-3
    write_pictures(run, tmp_path)
    run_card_code(tmp_path / "out", (W, H))


@pytest.mark.slow
def test_a_pipeline_takes_images_as_arguments(tmp_path):
    from diffusers import DiffusionPipeline

    run = with_images(UNET)
    run.export(tmp_path / "out", format="diffusers")
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out", trust_remote_code=True, low_cpu_mem_usage=False)
    pipe.set_progress_bar_config(disable=True)
    given = given_of(run)
    of = {"batch_size": COUNT, "num_inference_steps": run.config.sampler.steps, "output_type": "np"}
    noise = NoiseSource(0, range(COUNT), run.config.input_shape)
    images = pipe(**of, generator=noise.generators, **given).images
    assert difference(2 * images.transpose(0, 3, 1, 2) - 1, drawn(run, given).clamp(-1, 1)) < 1e-3
    with pytest.raises(ValueError, match="mask is 3x2 pixels, and this model takes 16x8"):
        pipe(mask=np.zeros((2, 3)))
    write_pictures(run, tmp_path)
    run_card_code(tmp_path / "out", (W, H))


@pytest.mark.slow
def test_a_denoiser_takes_images_in_the_units_of_a_run(tmp_path):
    run = of_values()
    run.export(tmp_path / "out", format="denoiser")
    denoiser = run_path(str(tmp_path / "out/denoiser.py"))["load"](tmp_path / "out" / "denoiser.safetensors")
    given, x = given_of(run), torch.randn(3, *run.config.input_shape)
    asked = run.config.conditions.parse(read_pictures(run.config, given, 3))
    told, logsnr = run.config.conditions.conditions(asked, range(3)), torch.full((3,), -2 * np.log(0.7))
    alpha = run.config.diffusion.path(logsnr)[0][:, None, None, None]
    with torch.no_grad():
        expected = Denoiser(run.network, run.config.diffusion)(alpha * x, logsnr, told)
    assert difference(denoiser(x, 0.7, given=given), expected) < 1e-5 * expected.abs().max()
    write_pictures(run, tmp_path)
    run_card_code(tmp_path / "out", (W, H))


def code_of(run):
    """The reader of conditions in an export, and their descriptions as a file has them."""
    from unfog.export import given_images, given_values

    assert given_images
    described = json.loads(json.dumps(describe_columns(run.config)))
    return lambda given, count=1: dict(
        zip([one["name"] for one in described], given_values.read(described, given, count))
    )


def test_images_are_read_as_by_unfog():
    """Small and large copies, pictures of Pillow, floats, and greys for colours."""
    for run in (with_images(columns=IMAGES), of_values(), with_images(columns=PAINTED)):
        read, given = code_of(run), given_of(run)
        more = {name: [image] for name, (image, *_) in given.items()}
        if run.config.image_format.is_picture and "hole" in given:
            stored = np.random.default_rng(1).integers(0, 256, (H, W, 3), np.uint8)
            more["degrade"] += [stored, stored / 255, stored[..., 0], Image.fromarray(stored)]
            more["grey"] += [stored, stored[..., :1], Image.fromarray(stored).convert("P"), stored / np.float32(255)]
            nan = stored / 255
            nan[1:3, 4:9] = np.nan
            more["hole"] += [nan, Image.fromarray(given["hole"][0])]
            mask = given["mask"][0][..., 0]
            more["mask"] += [mask, mask.astype(float), Image.fromarray(mask), torch.tensor(mask)]
            more["sketch"] += [Image.fromarray(stored), stored / 255, stored[..., 0]]
        for name, images in more.items():
            for image in images:
                (picture,) = read_pictures(run.config, {name: [image]}, 1)[name]
                found = read({name: image})[name][0]
                assert found.dtype == np.float32
                np.testing.assert_allclose(found, picture_of(picture), rtol=1e-5, atol=2e-6, err_msg=name)
    both = code_of(with_images(columns=IMAGES))({"grey": [None, stored]}, 3)
    assert np.isnan(both["grey"]).all((1, 2, 3)).tolist() == [True, False, True]
    assert np.isnan(both["mask"]).all()


NONSENSE = {
    "text": ({"grey": "a.png"}, "grey = 'a.png' is not an image"),
    "number": ({"grey": 3}, "grey = '3' is not an image"),
    "size": ({"grey": np.zeros((16, 8))}, "grey is 8x16 pixels, and this model takes 16x8"),
    "small": ({"degrade": np.zeros((2, 4))}, "takes 8x4 or 16x8"),
    "channels": ({"hole": np.zeros((H, W, 2))}, "hole"),
    "whole": ({"hole": np.zeros((H, W, 3))}, "nothing of the image is missing"),
    "range": ({"sketch": np.full((H, W, 3), 2.0)}, "sketch is float64; give bytes"),
    "label": ({"mask": np.full((H, W), 9)}, "mask has the value 9, and the masks of this model have 0, 3, 255"),
    "fraction": ({"mask": np.full((H, W), 0.5)}, "not whole numbers"),
    "transparent": ({"sketch": Image.new("RGBA", (W, H))}, "transparency"),
    "planes": ({"depth": np.zeros((H, W, 2))}, "depth has 2 channels"),
    "deep": ({"sketch": Image.new("I;16", (W, H))}, "sketch is a picture of mode I;16; give one of 8 bits"),
    "palette": ({"depth": Image.new("P", (W, H))}, "depth is a picture of mode P; give its values as an array"),
    "nan": ({"depth": np.full((H, W), np.nan)}, "depth has values that are NaN or infinite"),
}


@pytest.mark.parametrize(("given", "message"), NONSENSE.values(), ids=NONSENSE)
def test_what_is_no_such_image_is_refused_in_words(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        code_of(with_images(columns=IMAGES))(given)


def test_values_are_taken_whole_and_from_arrays():
    read = code_of(of_values())
    unknown = np.zeros((H, W, 2), np.float32)
    unknown[0, 0] = np.nan  # enlarging would spread it over the whole image
    with pytest.raises(ValueError, match="degrade has values that are NaN or infinite"):
        read({"degrade": unknown})
    blue = Image.new("RGB", (W, H), (0, 0, 255))
    blue.paste((0, 0, 0), (0, 0, 3, 3))
    with pytest.raises(ValueError, match="nothing of the image is missing"):  # blue does not say what is known
        read({"hole": blue})
