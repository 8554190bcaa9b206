"""Images as conditions of runs that keep the aspects of their images: `--aspect keep` with masks and `degrade`."""

import numpy as np
import pytest
from PIL import Image

from launches import SETTINGS, ended, forked, largest_difference, output, weights  # noqa: F401  a fixture
from unfog.config.validate import check_sample_size
from unfog.data.buckets.prepare import BucketChoice, prepare_buckets
from unfog.data.columns.made import add_made
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError
from unfog.from_python import training_settings
from unfog.inference.run import Run
from unfog.pipeline.given_images import sizes_of_pictures
from unfog.pipeline.load_data import _bucket_choice
from unfog.process.run_folder import RunFolder
from unfog.runs.sample import _parts as divided
from unfog.values.condition_format import facts_of

SHAPES = (32, 32), (48, 24), (24, 48)
CONDITION = "degrade:factor=4"


def write_pairs(place, labels=lambda i: {0, 1 + i % 3}):
    """Write 60 pictures of three shapes, and masks of these labels that are the red channel of the pictures."""
    for name in ("images", "masks"):
        (place / name).mkdir(parents=True)
    draw = np.random.default_rng(0)
    for i in range(60):
        width, height = SHAPES[i % 3]
        mask = draw.choice(sorted(labels(i)), (height // 8, width // 8)).repeat(8, 0).repeat(8, 1).astype(np.uint8)
        picture = np.stack([50 * mask, 0 * mask, 255 - 0 * mask], -1)
        Image.fromarray(picture).save(place / "images" / f"{i:02}.png")
        Image.fromarray(mask).save(place / "masks" / f"{i:02}.png")
    return place / "images", place / "masks"


def read(images, masks, condition=""):
    return prepared(images, f"mask={masks}:mask{condition}")


def prepared(images, condition):
    settings = Data(size=32, aspect="keep", condition=condition, cache="memory")
    choice = BucketChoice(lambda height, width: height % 8 == width % 8 == 0, 4)
    return add_made(prepare_buckets(open_source(str(images)), settings, choice, lambda line: None))


def test_each_bucket_has_the_masks_of_its_images_at_its_size(tmp_path):
    dataset = read(*write_pairs(tmp_path), f",{CONDITION}")
    assert [part.settings.size for part in dataset.buckets] == ["24x48", 32, "48x24"]
    for part in dataset.buckets:
        assert part.train.columns["mask"].categories == ("0", "1", "2", "3")  # each bucket has two of them
        for images in (part.train, part.held_out):
            # All squares are of 8 pixels, which no cut or resizing blurs.
            np.testing.assert_array_equal(50 * images.columns["mask"].values[:, 0].astype(int), images.pixels[:, 0])
            assert images.columns["degrade"].values.shape == images.pixels.shape
    (facts,) = facts_of([dataset.train.columns["mask"]])
    assert facts.statistics == (1.0, *map(float, dataset.settings.image_format.shape[1:]))


def test_the_joined_set_has_masks_of_one_size_with_whole_labels(tmp_path):
    dataset = read(*write_pairs(tmp_path))
    column = dataset.train.columns["mask"]
    assert column.values.shape == (len(dataset.train), 1, *dataset.settings.image_format.shape[1:])
    assert set(np.unique(np.asarray(column.values))) == {0, 1, 2, 3}
    np.testing.assert_array_equal(column.values[1, 0], np.asarray(column.values)[1, 0])
    rows = np.array([len(dataset.train) - 1, 0])
    taken = dataset.train.take(rows)
    np.testing.assert_array_equal(taken.columns["mask"].values, np.asarray(column.values)[rows])
    same = dataset.of_one_size
    first = [part.settings.size for part in dataset.buckets].index(same.settings.size)
    start = sum(len(part.train) for part in dataset.buckets[:first])
    np.testing.assert_array_equal(column.values[start : start + 3], same.train.columns["mask"].values[:3])


def test_masks_may_be_constant_in_a_bucket_and_not_in_all(tmp_path):
    dataset = read(*write_pairs(tmp_path / "a", lambda i: {i % 3}))
    assert dataset.train.columns["mask"].categories == ("0", "1", "2")
    with pytest.raises(RequestError, match="one value"):
        read(*write_pairs(tmp_path / "b", lambda i: {1}))


def test_pictures_of_floating_point_have_the_range_of_their_values_in_the_buckets(tmp_path):
    images, _ = write_pairs(tmp_path)
    (tmp_path / "maps").mkdir()
    draw = np.random.default_rng(0)
    for i in range(60):
        width, height = SHAPES[i % 3]
        np.save(tmp_path / "maps" / f"{i:02}.npy", draw.normal(0, 1, (height, width)).astype(np.float32))
    dataset = prepared(images, f"map={tmp_path / 'maps'}:image")
    values = [part.train.columns["map"].values for part in dataset.buckets]
    (facts,) = facts_of([dataset.train.columns["map"]])
    assert facts.statistics[3:] == (min(part.min() for part in values), max(part.max() for part in values))


def test_damaged_masks_of_a_bucket_are_unknown_and_counted_in_all(tmp_path):
    images, masks = write_pairs(tmp_path)
    for i in (*range(0, 60, 3), 1):  # those of the squares, and another
        (masks / f"{i:02}.png").write_bytes(b"no image")
    dataset = read(images, masks)
    assert any("21 of 60 images cannot be used" in line for line in dataset.warnings)
    square = next(part for part in dataset.buckets if part.settings.size == 32)
    assert (square.train.columns["mask"].values == -1).all()
    assert square.train.columns["mask"].categories == ("0", "2", "3")  # label 1 was in squares
    for path in masks.iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(RequestError, match="none of its images can be used"):
        read(images, masks)


def test_buckets_leave_two_pixels_a_side_to_small_images():
    settings = {"condition": "degrade:factor=16", "size": 24, "aspect": "keep"}
    fits = _bucket_choice(training_settings("fashion", "default", settings)).fits
    assert fits(32, 48)
    assert not fits(16, 32)


def test_another_mask_is_another_set(tmp_path):
    images, masks = write_pairs(tmp_path)
    before = read(images, masks).train.fingerprint
    assert read(images, masks).train.fingerprint == before
    with Image.open(masks / "04.png") as image:
        values = np.asarray(image).copy()
    values[:8, :8] = 3 - values[:8, :8]
    Image.fromarray(values).save(masks / "04.png")
    assert read(images, masks).train.fingerprint != before


@pytest.mark.slow
@pytest.mark.usefixtures("ended")
def test_a_run_resumes_to_the_bit_and_draws_each_picture_in_its_bucket(tmp_path):
    images, masks = write_pairs(tmp_path)

    def train(run, *flags):
        condition = f"mask={masks},{CONDITION},grey"
        flags = ("--aspect", "keep", "--size", 32, "--condition", condition, *flags)
        output(forked(["train", images, "--out", run, *SETTINGS, *flags]))
        return weights(run)

    whole = train(tmp_path / "whole", "--steps", 4)
    train(tmp_path / "half", "--steps", 2)
    output(forked(["resume", tmp_path / "half", "--steps", 4]))
    assert largest_difference(whole, weights(tmp_path / "half")) == 0

    config = RunFolder(tmp_path / "whole").read_config()
    assert sizes_of_pictures(config, {"mask": str(masks)}, 3) == [32, "44x24", "24x44"]
    assert sizes_of_pictures(config, {"mask": str(masks), "degrade": None, "grey": None}, 2) == [32, "44x24"]
    assert sizes_of_pictures(config, {"mask": None, "grey": str(images)}, 2) == [32, "44x24"]
    for bucket in config.size_buckets:
        assert {one.statistics[1:3] for one in config.at_size(bucket.size).columns} == {
            config.at_size(bucket.size).image_format.shape[1:]
        }
    with pytest.raises(RequestError, match="give 24x44 or 32 or 44x24"):
        check_sample_size(config.at_size("40x24"))
    out = tmp_path / "out"
    given = ("--given", f"mask={masks}", "--steps", 2, "--device", "cpu")
    output(forked(["sample", tmp_path / "whole", "-n", 4, "--out", out, *given]))
    drawn = [Image.open(path).size for path in sorted(out.glob("0*.png"))]
    assert drawn == [(32, 32), (44, 24), (24, 44), (32, 32)]
    run = Run(tmp_path / "whole", device="cpu")
    parts, _ = divided(run, run.prepare(n=7, steps=2), {"mask": str(masks)}, split=True)
    assert [[*part.prepared.generation.indices] for part in parts] == [[0, 3, 6], [1, 4], [2, 5]]  # a batch a size
    assert [numbers for part in parts for numbers, _ in part.run.draw(part.prepared)] == [(0, 3, 6), (1, 4), (2, 5)]
    output(forked(["sample", tmp_path / "whole", "-n", 3, "--out", tmp_path / "free", *given[2:]]))
    assert {Image.open(path).size for path in (tmp_path / "free").glob("0*.png")} == {(32, 32), (44, 24), (24, 44)}
