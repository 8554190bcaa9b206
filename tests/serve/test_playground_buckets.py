"""Pictures of several shapes: the size of an edit in Python, by command and on the page, and the search for copies."""

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'unfog[serve]'")
pytest.importorskip("orjson", reason="orjson is not installed: pip install 'unfog[serve]'")

import unfog
from conftest import NETWORK
from image_bytes import png
from studio_jobs import Said, draw, pixels
from unfog.config.requests.sample import SampleRequest
from unfog.data.buckets.joined_set import cover
from unfog.runs.sample import sample
from unfog.serve.playground.channel import Message
from unfog.serve.playground.images import at_run_size, format_for
from unfog.serve.playground.studio import find_copies
from unfog.values.image_format import ImageFormat

SETTINGS = {"network": NETWORK, "device": "cpu", "precision": "fp32", "batch": 8, "preview": {"every": -1}}
TALL, WIDE = (40, 24, 3), (24, 40, 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on 36 wide and 24 tall images, in a bucket each."""
    folder, random = tmp_path_factory.mktemp("mixed"), np.random.default_rng(0)
    for i in range(60):
        coarse = random.integers(0, 256, (10, 6, 3) if i % 5 < 2 else (6, 10, 3), np.uint8)
        Image.fromarray(coarse.repeat(4, 0).repeat(4, 1)).save(folder / f"{i}.png")
    data = {"size": 16, "aspect": "keep"}
    out = tmp_path_factory.mktemp("runs") / "mixed"
    run = unfog.train(folder, out=out, steps=2, data=data, sampler={"steps": 2}, **SETTINGS)
    assert [(each.sides, each.images) for each in run.config.size_buckets] == [("12x20", 24), ("20x12", 36)]
    return run


def picture(shape, seed=3):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@pytest.mark.slow
def test_an_edit_has_the_shape_of_the_bucket_nearest_to_its_image(run, tmp_path):
    """The bucket with most images is the wide one, which a tall image was cut to."""
    assert run.sample(1).shape[1:] == (12, 20, 3)
    assert run.sample(1, image=picture(WIDE)).shape[1:] == (12, 20, 3)
    assert run.sample(1, image=picture(TALL)).shape[1:] == (20, 12, 3)
    assert run.sample(1, image=picture(TALL), size="20x12").shape[1:] == (12, 20, 3)
    file = tmp_path / "tall.png"
    Image.fromarray(picture(TALL)).save(file)
    mask = np.full(TALL[:2], 255, np.uint8)
    mask[:20] = 0
    Image.fromarray(mask).save(tmp_path / "mask.png")
    asked = {"image": file, "mask": tmp_path / "mask.png", "n": 1, "repeats": 1, "device": "cpu"}
    sample(SampleRequest(run=run.path, out=tmp_path / "out", **asked))
    (made,) = (one for one in (tmp_path / "out").glob("*.png") if one.name != "grid.png")
    expected = run.sample(1, image=picture(TALL), mask=mask, repeats=1)
    assert np.array_equal(np.asarray(Image.open(made)), expected[0])


@pytest.mark.slow
def test_the_page_draws_an_edit_in_that_shape(run):
    format = format_for(run.path, picture(TALL))
    assert (format.height, format.width) == (20, 12)
    wide = format_for(run.path, picture(WIDE))
    assert (wide.height, wide.width) == (12, 20)
    prepared = at_run_size(picture(TALL), format)
    said = draw(run, image=png(prepared), strength=1.0)
    assert said.of("began")[0].head["size"] == "12x20"
    assert np.array_equal(pixels(said.of("done")[0]), run.sample(2, image=picture(TALL), strength=1.0))


def test_images_of_every_shape_are_searched_for_copies(run):
    """An upload of a tall training image, cut to the wide bucket, was said to be no copy."""
    wide, tall = ImageFormat(3, 12, 20), ImageFormat(3, 20, 12)
    for number, format in ((0, wide), (0, tall), (2, wide), (2, tall)):
        known = np.asarray(Image.open(f"{run.config.source}/{number}.png"))
        drawn = np.stack([at_run_size(known, format), picture((format.height, format.width, 3))])
        said = Said()
        find_copies(said, 7, Message({"run": str(run.path), "images": drawn.shape}, drawn.tobytes()))
        (found,) = said.messages
        assert [one["copy"] for one in found.head["pictures"]] == [True, False]
        assert found.head["searched"] == 60
        assert tuple(found.head["images"][1:]) == drawn.shape[1:]


def test_an_image_is_cut_at_its_centre_to_the_shape_of_another_bucket():
    images = picture((3, 30, 20, 3)).transpose(0, 3, 1, 2)
    assert np.array_equal(cover(images, ImageFormat(3, 30, 20)), images)
    assert np.array_equal(cover(images, ImageFormat(3, 10, 20)), images[:, :, 10:20])
    assert np.array_equal(cover(images, ImageFormat(3, 30, 10)), images[:, :, :, 5:15])
