"""Pictures that samples are given, with other channels and types than the pictures of training."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from unfog.config.schema import Config
from unfog.data.settings import Data
from unfog.errors import RequestError
from unfog.pipeline.edit_images import edit_size
from unfog.pipeline.given_images import read_pictures
from unfog.values.columns import Column
from unfog.values.condition_format import facts_of
from unfog.values.kinds.image_kinds import picture_of

RED = np.zeros((8, 8, 3), np.uint8) + np.array([200, 0, 0], np.uint8)
LABELS = np.arange(64, dtype=np.uint8).reshape(8, 8) % 3
BYTES = [0.0, 255.0]


def column(channels, values=BYTES):
    """A condition whose training pictures have these channels, and the least and largest of these values."""
    ends = np.array(values, np.uint8 if values is BYTES else np.float32).repeat(channels)
    return Column("twin", "image", np.broadcast_to(ends.reshape(2, channels, 1, 1), (2, channels, 8, 8)))


def read(condition, picture):
    config = Config(data=Data(size=8, channels=3), columns=facts_of([condition]))
    return picture_of(str(read_pictures(config, {condition.name: picture}, 1)[condition.name][0]))


def palette(numbers):
    image = Image.fromarray(numbers)
    image.putpalette([255 - value for value in range(256) for _ in range(3)])
    return image


@pytest.mark.parametrize(
    ("channels", "picture", "values"),
    [
        (3, RED, [200, 0, 0]),
        (3, RED[..., 0], [200, 200, 200]),
        (3, Image.new("LA", (8, 8), (200, 255)), [200, 200, 200]),
        (3, Image.new("RGBA", (8, 8), (200, 0, 0, 0)), [255, 255, 255]),  # transparent, before white
        (3, palette(np.full((8, 8), 5, np.uint8)), [250, 250, 250]),
        (3, Image.fromarray(np.full((8, 8), 65535, np.uint16)), [255, 255, 255]),
        (1, RED, [60]),  # brightness of Rec. 601
        (4, np.full((8, 8, 4), 7, np.uint8), [7] * 4),
        (2, np.full((8, 8, 2), 7, np.uint8), [7, 7]),
    ],
)
def test_grey_and_colour_become_each_other(channels, picture, values):
    found = read(column(channels), picture)
    assert found.shape == (channels, 8, 8)
    assert found.mean((1, 2)) == pytest.approx(values, abs=0.5)


@pytest.mark.parametrize("names", [("0", "1"), ("0", "255"), ("0", "1", "2")])
def test_booleans_are_the_two_labels_of_a_mask(names):
    masks = Column("labels", "mask", np.arange(len(names)).reshape(-1, 1, 1, 1).repeat(64).reshape(-1, 1, 8, 8), names)
    assert np.array_equal(read(masks, LABELS > 0)[0], LABELS > 0)


def test_booleans_of_pictures_are_black_and_white():
    assert np.array_equal(read(column(1), LABELS > 0)[0], 255.0 * (LABELS > 0))


@pytest.mark.parametrize(
    ("channels", "picture", "said"),
    [
        (3, RED[..., :2], "2 channels; give 1"),
        (3, np.zeros((1, 8, 8, 5), np.uint8), "5 channels; give 1"),
        (3, np.zeros((8, 8, 2)), "2 channels; give 1"),
        (2, RED, "3 channels, and the condition 2; give an array .H, W, 2"),
        (2, Image.fromarray(RED), "3 channels, and the condition 2"),
        (2, Image.new("LA", (8, 8)), "give an array .H, W, 2"),
        (4, Image.new("RGBA", (8, 8)), "give an array .H, W, 4"),
        (4, np.zeros((8, 8), np.float32), "1 channels, and the condition 4"),
    ],
)
def test_other_channels_are_refused_with_the_number_wanted(channels, picture, said):
    for values in (BYTES, [-1.0, 2.0]):  # a condition of bytes, and one in other units
        with pytest.raises(RequestError, match=f"twin = .*{said}"):
            read(column(channels, values), picture)


@pytest.mark.parametrize("kind", ["numbers", "palette", "16 bits", "twice as large"])
def test_masks_of_every_type_have_the_labels_of_training(kind):
    mask = Column("mask", "mask", LABELS[None, None].repeat(2, 0).astype(np.int8), ("0", "1", "2"))
    pictures = {
        "numbers": LABELS,
        "palette": palette(LABELS),
        "16 bits": Image.fromarray(LABELS.astype(np.uint16)),  # mode I;16
        "twice as large": LABELS.repeat(2, 0).repeat(2, 1),
    }
    assert np.array_equal(read(mask, pictures[kind])[0], LABELS)
    with pytest.raises(RequestError, match="has the value 30000, and the masks of the run have 0, 1, 2"):
        read(mask, LABELS.astype(np.uint16) * 30000)


def test_an_array_file_has_one_image_or_several_and_gives_its_name(tmp_path):
    mask = Column("mask", "mask", LABELS[None, None].repeat(2, 0).astype(np.int8), ("0", "1", "2"))
    config = Config(data=Data(size=8, channels=3), columns=facts_of([mask]))
    given = {"plane": LABELS, "one": LABELS[None], "two": np.stack([LABELS, LABELS.T]), "flags": LABELS > 0}
    for name, values in given.items():
        np.save(tmp_path / f"{name}.npy", values)

    def pictures(text, most=4):
        return read_pictures(config, {"mask": text}, most)["mask"]

    found = [*pictures(str(tmp_path / "plane.npy")), *pictures(str(tmp_path / "one.npy"))]
    assert [str(one).split("|")[0] for one in found] == ["plane", "one"]
    assert all(np.array_equal(picture_of(str(one))[0], LABELS) for one in found)
    first, second = pictures(str(tmp_path / "two.npy"))
    assert [str(one).split("|")[0] for one in (first, second)] == ["two-0", "two-1"]
    assert np.array_equal(picture_of(str(second))[0], LABELS.T)
    for count in (3, 4):  # not the channels of one picture
        np.save(tmp_path / "many.npy", np.stack([LABELS, LABELS.T, LABELS, LABELS])[:count])
        assert len(pictures(str(tmp_path / "many.npy"))) == count
    assert len(pictures(str(tmp_path / "many.npy"), most=2)) == 2
    both = pictures(f"{tmp_path / 'plane.npy'},{tmp_path / 'two.npy'}")
    assert len(both) == 3
    (flags,) = pictures(str(tmp_path / "flags.npy"))
    assert np.array_equal(picture_of(str(flags))[0], LABELS > 0)
    np.save(tmp_path / "objects.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    with pytest.raises(RequestError, match="given 'mask'"):
        pictures(str(tmp_path / "objects.npy"))


@pytest.mark.parametrize("name", ["missing.png", "a\0b.png"])
def test_an_image_that_cannot_be_opened_has_no_size_of_its_own(tmp_path: Path, name: str) -> None:
    config = SimpleNamespace(size_buckets=[SimpleNamespace(size=16)], data=SimpleNamespace(size=16))
    assert edit_size(config, tmp_path / name) == 0  # building the edit says why
