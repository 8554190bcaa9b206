"""Conditions that are images: their setting, their pairs, masks, and the geometry that they share with the image."""

import numpy as np
import pytest
import torch
from PIL import Image

from unfog.data.augmentation import Augment, AugmentWithConditions
from unfog.data.columns.conditions import resolved_condition
from unfog.data.columns.given import store_images
from unfog.data.columns.image_setting import split_images
from unfog.data.columns.made import add_made, without_made
from unfog.data.prepare import prepare
from unfog.data.settings import Data, parse_condition
from unfog.data.sources.registry import open_source
from unfog.device.sharded_rng import rows_of
from unfog.errors import RequestError
from unfog.models.image_conditions import IMAGES
from unfog.values.columns import Column
from unfog.values.condition_format import ConditionFormat, conditions_of, facts_of
from unfog.values.conditions import Conditions
from unfog.values.kinds.image_kinds import IMAGE_KINDS, picture_of, picture_text
from unfog.values.kinds.made_conditions import enlarged, fixed_draws, reduced

HEIGHT, WIDTH = 12, 16


def write_pairs(path, count=8, suffix=".png"):
    """Write images whose red channel shows their mask, which has the labels 0, 1 and 7, and the masks."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (path / name / "a").mkdir(parents=True)
    for i in range(count):
        mask = rng.choice([0, 1, 7], (HEIGHT, WIDTH)).astype(np.uint8)
        image = np.stack([30 * mask, *rng.integers(0, 255, (2, HEIGHT, WIDTH))], -1).astype(np.uint8)
        Image.fromarray(image).save(path / "images" / "a" / f"{i}.png")
        shown = Image.fromarray(mask)
        shown.putpalette([value for k in range(256) for value in (k, 0, 255 - k)])
        shown.save(path / "masks" / "a" / f"{i}{suffix}")
    return path / "images", path / "masks"


def read(images, condition, **settings):
    settings = {"size": f"{WIDTH}x{HEIGHT}", "held_out": 0.0, "cache": "memory", **settings}
    return prepare(open_source(str(images)), Data(condition=condition, **settings))


def test_the_setting_names_images_beside_columns():
    images, rest = split_images("degrade:factor=2,grey,mask=data/m:mask,age:category,edges=hf:x/y")
    assert images.made == {"degrade": 2, "grey": 0}
    assert images.second == {"mask": ("data/m", "mask"), "edges": ("hf:x/y", "")}
    assert rest == "age:category"
    assert split_images("degrade")[0].made == {"degrade": 4}
    assert parse_condition("hole,t.csv:age") == ("t.csv", {"age": ""})


@pytest.mark.parametrize(
    ("condition", "word"),
    [
        ("degrade:factor=1", "2 to"),
        ("degrade:4", "degrade:factor=4"),
        ("grey,grey", "twice"),
        ("mask=a,mask=b", "twice"),
        ("mask=a,mask", "twice"),
        ("mask=", "no source"),
        ("grey=folder", "another name"),
        ("mask=python:m:C", "Python"),
    ],
)
def test_wrong_settings_are_refused(condition, word):
    with pytest.raises(RequestError, match=word):
        Data(condition=condition)


def test_images_do_not_suit_unknown_pixels_and_grey_images(tmp_path):
    with pytest.raises(RequestError, match="unknown"):
        Data(condition="hole", unknown="nan")
    with pytest.raises(RequestError, match="colour"):
        Data(condition="grey", channels=1)
    images, _ = write_pairs(tmp_path)
    with pytest.raises(RequestError, match="multiples of 5"):
        add_made(read(images, "degrade:factor=5"))


def test_masks_are_paired_by_name_and_keep_their_labels(tmp_path):
    images, masks = write_pairs(tmp_path)
    found = read(images, f"mask={masks}").train
    column = found.columns["mask"]
    assert (column.kind, column.categories) == ("mask", ("0", "1", "7"))
    labels = np.array([0, 1, 7])[column.values[:, 0]]
    assert np.array_equal(30 * labels, found.pixels[:, 0])
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in masks.glob("a/*"):
        Image.open(path).save(flat / f"{path.stem}.bmp")
    assert np.array_equal(read(images, f"mask={flat}").train.columns["mask"].values, column.values)


def test_arrays_of_booleans_are_masks_of_two_labels(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))
    images, _ = write_pairs(tmp_path)
    masks = np.random.default_rng(0).random((8, HEIGHT, WIDTH)) < 0.5
    np.save(tmp_path / "masks.npy", masks)
    (tmp_path / "folder" / "a").mkdir(parents=True)
    for i, mask in enumerate(masks):
        np.save(tmp_path / "folder" / "a" / f"{i}.npy", mask)
    pictures = tmp_path / "images.npy"
    np.save(pictures, np.zeros((8, HEIGHT, WIDTH, 3), np.uint8))
    others, condition = store_images({"temp": list(range(8)), "mask": masks}, "")
    assert list(others) == ["temp"]
    first, word = condition.split(",")
    assert first == "temp"
    assert store_images({"mask": masks}, "mask:mask,temp")[1] == f"temp,{word}"
    labels = {}
    for name, condition in {"npy": f"mask={tmp_path / 'masks.npy'}", "python": word}.items():
        labels[name] = read(pictures, condition).train.columns["mask"]
    labels["folder"] = read(images, f"mask={tmp_path / 'folder'}").train.columns["mask"]
    for column in labels.values():
        assert (column.kind, column.categories) == ("mask", ("0", "1"))
        np.testing.assert_array_equal(column.values[:, 0], masks)


def test_arrays_that_the_condition_does_not_name_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))
    columns = {"age": list(range(8)), "mask": np.zeros((8, HEIGHT, WIDTH), bool)}
    assert store_images(columns, "age") == ({"age": columns["age"]}, "age")
    assert store_images(columns, "degrade:factor=4")[1] == "degrade:factor=4"
    for condition in ("mask:category", "mask=other.npy"):
        with pytest.raises(RequestError, match=r"image or mask|one of them"):
            store_images(columns, condition)
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "a,b"))
    with pytest.raises(RequestError, match="comma"):
        store_images(columns, "")


def test_images_without_a_partner_are_counted_and_not_known(tmp_path):
    images, masks = write_pairs(tmp_path)
    for i in range(3):
        (masks / "a" / f"{i}.png").unlink()
    Image.new("L", (WIDTH, HEIGHT)).save(masks / "a" / "other.png")
    found = read(images, f"mask={masks}")
    assert any("3 of 8" in line for line in found.warnings)
    assert any("1 image without a partner" in line for line in found.warnings)
    assert (found.train.columns["mask"].values.reshape(8, -1) == -1).all(1).tolist() == [True] * 3 + [False] * 5
    assert found.train.conditions_of(np.arange(8)).image.isnan().sum() == 3 * HEIGHT * WIDTH
    for i in range(3, 5):
        (masks / "a" / f"{i}.png").unlink()
    with pytest.raises(RequestError, match="3 of 8"):
        read(images, f"mask={masks}")


def test_masks_of_16_bits_of_colours_and_of_another_size(tmp_path):
    images, masks = write_pairs(tmp_path)
    kinds = {"deep": [], "rgb": [], "large": []}
    for name in kinds:
        (tmp_path / name / "a").mkdir(parents=True)
    for path in masks.glob("a/*"):
        mask = np.asarray(Image.open(path))
        Image.fromarray(mask.astype(np.uint16) * 1000).save(tmp_path / "deep" / "a" / path.name)
        Image.fromarray(np.stack([mask, mask * 0, mask], -1)).save(tmp_path / "rgb" / "a" / path.name)
        Image.fromarray(mask.repeat(3, 0).repeat(3, 1)).save(tmp_path / "large" / "a" / path.name)
    expected = read(images, f"mask={masks}").train.columns["mask"].values
    names = {"deep": ("0", "1000", "7000"), "rgb": ("#000000", "#010001", "#070007"), "large": ("0", "1", "7")}
    for name, labels in names.items():
        column = read(images, f"mask={tmp_path / name}").train.columns["mask"]
        assert column.categories == labels
        assert np.array_equal(column.values, expected)


def test_numbers_in_a_file_of_arrays_are_refused_with_the_ways_to_give_a_column(tmp_path):
    images, _ = write_pairs(tmp_path)
    np.save(tmp_path / "amp.npy", np.arange(240.0))
    with pytest.raises(RequestError, match=r"condition amp: .*the shape 240.*TABLE\.csv:amp with file_name 00000000"):
        read(images, f"amp={tmp_path / 'amp.npy'}")
    np.save(tmp_path / "amp.npy", np.zeros((3, 4, 5, 6), complex))
    with pytest.raises(RequestError, match="give their magnitude") as refused:
        read(images, f"amp={tmp_path / 'amp.npy'}")
    assert "column" not in str(refused.value)


def test_masks_in_colour_beside_grey_ones_are_refused(tmp_path):
    images, masks = write_pairs(tmp_path)
    path = next(masks.glob("a/*"))
    grey = np.asarray(Image.open(path))
    Image.fromarray(np.stack([grey] * 3, -1)).save(path)
    with pytest.raises(RequestError, match="condition mask: some masks are in colour"):
        read(images, f"mask={masks}")


def test_masks_that_say_nothing_or_are_pictures_are_refused(tmp_path):
    images, masks = write_pairs(tmp_path)
    for path in masks.glob("a/*"):
        Image.new("L", (WIDTH, HEIGHT)).save(path)
    found = read(images, f"mask={masks}")
    assert found.train.columns["mask"].kind == "image"
    assert any("end the condition with :mask" in line for line in found.warnings)
    with pytest.raises(RequestError, match="one value"):
        read(images, f"mask={masks}:mask")
    with pytest.raises(RequestError, match="64 values"):
        read(images, f"mask={images}:mask")
    for path in masks.glob("a/*"):
        Image.new("L", (WIDTH, WIDTH)).save(path)
    with pytest.raises(RequestError, match="proportions"):
        read(images, f"mask={masks}")
    with pytest.raises(RequestError, match="condition mask"):
        read(images, f"mask={tmp_path / 'nowhere'}")


def test_pictures_and_arrays_are_conditions_in_their_units(tmp_path):
    images, _ = write_pairs(tmp_path)
    twin = read(images, f"twin={images}").train
    assert twin.columns["twin"].kind == "image"
    assert np.array_equal(twin.columns["twin"].values, twin.pixels)
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.integers(0, 255, (6, HEIGHT, WIDTH, 3), np.uint8))
    heights = rng.normal(300, 900, (6, HEIGHT, WIDTH, 2)).astype(np.float32)
    np.save(tmp_path / "y.npy", heights)
    column = read(tmp_path / "x.npy", f"height={tmp_path / 'y.npy'}").train.columns["height"]
    assert np.array_equal(column.values, heights.transpose(0, 3, 1, 2))
    (facts,) = facts_of([column])
    assert facts.statistics[3:] == pytest.approx([*heights.min((0, 1, 2)), *heights.max((0, 1, 2))])


def test_arrays_beside_the_images_of_a_file_are_images_too(tmp_path):
    rng = np.random.default_rng(0)
    mask = rng.choice([0, 3], (6, HEIGHT, WIDTH))
    arrays = {"mask": mask, "lit": mask > 0, "height": rng.normal(0, 90, (6, HEIGHT, WIDTH, 2)).astype(np.float32)}
    images = rng.integers(0, 255, (6, HEIGHT, WIDTH, 3), np.uint8)
    np.savez(tmp_path / "x.npz", images=images, few=mask[:5], tall=mask[:, :, :8], age=np.arange(6.0), **arrays)
    for name, values in arrays.items():
        np.save(tmp_path / f"{name}.npy", values)
    np.save(tmp_path / "short.npy", mask[:5] > 0)
    np.save(tmp_path / "long.npy", np.concatenate([mask, mask[:1]]))
    together = read(tmp_path / "x.npz", "height,mask,age,lit").train.columns
    apart = read(tmp_path / "x.npz", ",".join(f"{name}={tmp_path / name}.npy" for name in arrays)).train.columns
    for name in arrays:
        one, other = together[name], apart[name]
        assert (one.kind, one.categories) == (other.kind, other.categories)
        assert np.array_equal(one.values, other.values)
    assert (together["age"].kind, together["mask"].categories) == ("number", ("0", "3"))
    assert read(tmp_path / "x.npz", "mask:image").train.columns["mask"].kind == "image"
    for condition, said in (
        ("few", "condition few: .*x.npz:few has 5 images, and there are 6; give one for each"),
        ("tall", "other proportions, 16x12 and 8x12"),
        ("mask:number", "are images, and not of kind number; omit :number"),
        ("age:mask", "age has values, and no images; give age=FOLDER:mask"),
        ("mask,mask=mask.npy", "twice"),
        (f"mask={tmp_path / 'short.npy'}", "short.npy has 5 images, and there are 6; give one for each"),
        (f"mask={tmp_path / 'long.npy'}", "long.npy has 7 images, and there are 6"),
    ):
        with pytest.raises(RequestError, match=said):
            read(tmp_path / "x.npz", condition)


def test_a_damaged_mask_is_named_and_its_image_stays(tmp_path):
    images, masks = write_pairs(tmp_path)
    whole = (masks / "a" / "0.png").read_bytes()
    (masks / "a" / "0.png").write_bytes(whole[: len(whole) // 2])
    (masks / "a" / "1.png").write_bytes(b"not an image")
    dataset = read(images, f"mask={masks}:mask")
    assert len(dataset.train) == 8
    assert "2 of 8 images cannot be used" in " ".join(dataset.warnings)
    assert (dataset.train.columns["mask"].values[:2] == -1).all()


def test_pictures_of_16_bits_keep_their_values(tmp_path):
    images, _ = write_pairs(tmp_path)
    (tmp_path / "deep").mkdir()
    for i in range(8):
        deep = np.linspace(i, 60_000, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH).astype(np.uint16)
        Image.fromarray(deep).save(tmp_path / "deep" / f"{i}.png")
    column = read(images, f"depth={tmp_path / 'deep'}:image").train.columns["depth"]
    assert column.values.dtype == np.float32
    assert column.values.max() == 60_000


def test_paths_of_a_setting_become_absolute_and_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "depth").mkdir()
    (tmp_path / "t.csv").write_text("file,age")
    assert resolved_condition("depth=depth,grey") == f"depth={tmp_path}/depth,grey"
    assert resolved_condition("depth = depth") == f"depth = {tmp_path}/depth"
    assert resolved_condition("a=t.csv_x,t.csv:age") == f"a=t.csv_x,{tmp_path}/t.csv:age"


@pytest.mark.parametrize("cache", ["memory", "disk", "none"])
def test_a_changed_mask_is_another_fingerprint(tmp_path, monkeypatch, cache):
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))
    images, masks = write_pairs(tmp_path)
    one, again = (read(images, f"mask={masks}", cache=cache).train for _ in range(2))
    assert one.fingerprint == again.fingerprint
    assert np.array_equal(one.columns["mask"].values, again.columns["mask"].values)
    paths = sorted(masks.glob("a/*"))
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [contents[-1], *contents[:-1]]):
        path.write_bytes(content)
    shifted = read(images, f"mask={masks}", cache=cache).train
    assert shifted.fingerprint != one.fingerprint
    assert not np.array_equal(shifted.columns["mask"].values, one.columns["mask"].values)


@pytest.mark.parametrize("settings", [{"flip": True}, {"wrap": "xy"}, {"crop": 0.4}, {"augment": 1.0}])
def test_a_mask_moves_with_its_image(settings):
    rng = np.random.default_rng(0)
    # Large areas, as a smooth image differs from its mask along their edges.
    mask = rng.integers(0, 2, (16, 1, 4, 4)).repeat(8, 2).repeat(8, 3).astype(np.int8)
    pixels = torch.from_numpy(255 * mask.astype(np.uint8))
    twin = 200 + 100 * mask.astype(np.float32)
    twin[0, :, :8] = np.nan
    columns = [Column("mask", "mask", mask, ("no", "yes")), Column("twin", "image", twin)]
    augment = Augment.from_settings(Data(size=32, channels=1, **settings))
    together = AugmentWithConditions(augment, facts_of(columns))
    torch.manual_seed(0)
    x0, told = together.with_conditions(pixels, conditions_of(columns))
    torch.manual_seed(0)
    alone, augmented = augment(pixels)
    assert torch.equal(alone, x0)
    assert told.augment is augmented is None or torch.equal(told.augment, augmented)
    assert ((x0[:, 0] > 0) == (told.image[:, 0] > 0.5)).float().mean() > 0.97
    assert not torch.equal(told.image[:, 0], torch.from_numpy(mask[:, 0]).float())
    assert set(told.image[:, 0].unique().tolist()) == {0.0, 1.0}
    unknown = told.image[:, 1].isnan()
    assert unknown[0].any()
    assert not unknown[1:].any()
    assert (told.image[1:, 1] - (250 + 50 * x0[1:, 0])).abs().mean() < 1.0


def test_made_conditions_are_those_of_the_augmented_image():
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (8, 3, 8, 8), np.uint8))
    facts = facts_of(
        Column(name, name, type("Values", (), {"shape": (8, channels, 8, 8), "factor": 4}))
        for name, channels in (("degrade", 3), ("grey", 1), ("hole", 3))
    )
    together = AugmentWithConditions(Augment(flip=True), facts)
    torch.manual_seed(0)
    x0, told = together.with_conditions(pixels, Conditions())
    degraded, grey, hole = told.image.split([3, 1, 3], 1)
    assert torch.equal(degraded, enlarged(reduced(x0, 4), 8, 8))
    assert torch.allclose(grey[:, 0], x0[:, 0] * 0.299 + x0[:, 1] * 0.587 + x0[:, 2] * 0.114)
    missing = hole.isnan()
    assert torch.equal(hole[~missing], x0[~missing])
    assert (missing.flatten(1).float().mean(1) > 0.03).all()
    assert len({tuple(each.flatten().tolist()) for each in missing[:, 0]}) > 1
    torch.manual_seed(0)
    with rows_of(3, 8):
        x0_part, part = together.with_conditions(pixels[3:5], Conditions())
    assert torch.equal(x0_part, x0[3:5])
    assert torch.equal(part.image[:, 3:4], told.image[3:5, 3:4])
    assert torch.equal(part.image[:, 4:].isnan(), told.image[3:5, 4:].isnan())


def test_held_out_images_have_the_same_hole_each_time(tmp_path):
    images, _ = write_pairs(tmp_path)
    made = add_made(read(images, "hole,degrade:factor=4"))
    rows = np.array([3, 5])
    told = made.train.conditions_of(rows)
    assert told.image.shape == (2, 6, HEIGHT, WIDTH)
    assert torch.equal(told.image.isnan(), made.train.conditions_of(rows).image.isnan())
    assert torch.equal(fixed_draws([3]), fixed_draws([5, 3])[1:])
    assert not without_made(made.train).columns
    assert made.train.fingerprint == read(images, "").train.fingerprint


def test_pictures_of_samples_are_texts():
    picture = np.random.default_rng(0).random((2, 3, 4), np.float32)
    picture[0, 0] = np.nan
    text = picture_text(picture, "a|b")
    assert np.array_equal(picture_of(str(text)), picture, equal_nan=True)
    facts = facts_of([Column("twin", "image", picture[None])])
    format = ConditionFormat(columns=facts)
    given = format.parse({"twin": [text]})
    assert np.array_equal(format.conditions(given, [0, 1]).image[1].numpy(), picture, equal_nan=True)
    assert format.names(given, 1) == ["twin=a_b"]
    assert format.untold(given) == []
    assert format.untold(format.usual) == ["twin"]
    assert format.conditions(format.usual, [0]).image.isnan().all()
    with pytest.raises(RequestError, match="not a picture"):
        format.parse({"twin": [3]})


def test_networks_take_all_kinds_of_images():
    assert sorted(IMAGES) == sorted(IMAGE_KINDS)
