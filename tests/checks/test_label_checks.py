"""Labels that are probably not the classes that were meant: masks, numbers, lists, two spellings of a word."""

import json
import os
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.data.sources.stored_images import Report, StoredImages
from unfog.errors import RequestError
from unfog.values.condition_format import ConditionFormat

IMAGES = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)


def fill(folder: Path, count: int, seed: int = 0, name: str = "{:03}.png") -> Path:
    folder.mkdir(parents=True)
    for i in range(count):
        pixels = np.random.default_rng((seed, i)).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name.format(i))
    return folder


def read(source: object, **settings: object):
    """Return (dataset, its warnings in one text)."""
    dataset = prepare(open_source(str(source)), Data(size=8, **settings))
    return dataset, "\n".join(dataset.warnings)


def write_npz(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("archive", [False, True])
def test_two_unicode_forms_of_a_folder_are_one_class(tmp_path, archive):
    for form in ("NFC", "NFD"):
        fill(tmp_path / "set" / unicodedata.normalize(form, "é"), 10, form == "NFD")
    fill(tmp_path / "set" / "other", 10, 2)
    source = tmp_path / "set"
    if archive:
        with zipfile.ZipFile(source := tmp_path / "set.zip", "w") as file:
            for path in (tmp_path / "set").rglob("*.png"):
                file.write(path, path.relative_to(tmp_path / "set"))
    dataset, said = read(source)
    assert dataset.train.classes == ("other", "é")
    assert dataset.report.class_counts == {"other": 10, "é": 20}
    assert "two forms of Unicode" in said
    assert ConditionFormat(dataset.train.classes).parse({"class": ["e\u0301"]}) == (("class", (1,)),)


def test_classes_that_differ_in_case_or_spaces_are_said(tmp_path):
    for i, name in enumerate(("Red fox", "red_fox", "wolf")):
        fill(tmp_path / "set" / name, 8, i)
    dataset, said = read(tmp_path / "set")
    assert len(dataset.train.classes) == 3
    assert "Red fox, red_fox" in said
    assert "wolf" not in said


def test_a_word_of_a_locale_without_utf8_names_a_class():
    assert ConditionFormat(["狗", "猫"]).parse({"class": [os.fsencode("猫").decode("ascii", "surrogateescape")]}) == (
        ("class", (1,)),
    )


@pytest.mark.parametrize(("images", "masks"), [("images", "masks"), ("img", "SegmentationClass"), ("a", "b")])
def test_masks_of_the_images_are_no_class(tmp_path, images, masks):
    fill(tmp_path / "set" / images, 20)
    folder = tmp_path / "set" / masks
    folder.mkdir()
    for i in range(20):
        Image.fromarray((IMAGES[i, ..., 0] > 128).astype(np.uint8) * 255).save(folder / f"{i:03}.png")
    with pytest.raises(RequestError, match=f"{masks}.*mask") as refused:
        read(tmp_path / "set")
    remedy = str(refused.value).partition("Give ")[2].partition(" to train")[0]
    assert read(remedy)[0].report.used == 20
    assert read(tmp_path / "set", labels="folders")[0].train.classes == tuple(sorted((images, masks)))


def test_classes_whose_files_are_numbered_alike_are_classes(tmp_path):
    for i, name in enumerate(("labels-of-wine", "zebras")):
        fill(tmp_path / "set" / name, 20, i)
    assert read(tmp_path / "set")[0].train.classes == ("labels-of-wine", "zebras")
    for name in "01":  # all of few values, as scanned digits are
        (tmp_path / "digits" / name).mkdir(parents=True)
        for i in range(10):
            Image.fromarray((IMAGES[i, ..., int(name)] > 128).astype(np.uint8) * 255).save(
                tmp_path / "digits" / name / f"{i}.png"
            )
    assert read(tmp_path / "digits")[0].train.classes == ("0", "1")


def test_numbers_are_said_to_be_classes_each(tmp_path):
    few, ages = np.arange(200) % 10, np.arange(200) % 25 + 18
    assert read(write_npz(tmp_path / "a.npz", images=np.repeat(IMAGES, 5, 0), labels=few))[1] == ""
    dataset, warned = read(write_npz(tmp_path / "b.npz", images=np.repeat(IMAGES, 5, 0), labels=ages))
    assert len(dataset.train.classes) == 25
    assert "25 numbers, from 18 to 42" in warned
    table = "file_name,label\n" + "".join(f"{i:03}.png,{(0.0, 2.5, 5.0, 7.5)[i % 4]}\n" for i in range(40))
    (fill(tmp_path / "set", 40) / "labels.csv").write_text(table)
    dataset, warned = read(tmp_path / "set")
    assert len(dataset.train.classes) == 4
    assert "4 numbers, from 0 to 7.5" in warned


def test_numbers_for_nearly_every_image_are_no_classes_unless_asked_for(tmp_path):
    ages = np.random.default_rng(0).permutation(1000)[:40]
    source = write_npz(tmp_path / "a.npz", images=IMAGES, labels=ages)
    dataset, said = read(source)
    assert dataset.train.classes == ()
    assert "40 numbers for 40 images" in said
    assert len(read(source, labels="folders")[0].train.classes) == 40


def test_words_joined_in_a_cell_are_said_to_be_one_class(tmp_path):
    rows = [f"{i:03}.png,{a};{b}" for i, (a, b) in enumerate((a, b) for a in "rgbcmyk" for b in "1234567")][:40]
    (fill(tmp_path / "set", 40) / "t.csv").write_text("\n".join(["file_name,label", *rows]))
    said = read(tmp_path / "set", labels="t.csv")[1]
    assert "joined by ';'" in said
    assert "several labels" in said


def test_names_of_kohya_are_said_to_be_names(tmp_path):
    for i, name in enumerate(("10_dog", "1_reg")):
        fill(tmp_path / "set" / name, 8, i)
    assert "captions" not in read(tmp_path / "set")[1]
    (tmp_path / "set" / "10_dog" / "000.txt").write_text("a dog")
    said = read(tmp_path / "set")[1]
    assert "10_dog" in said
    assert "captions" in said


def test_labels_of_one_column_are_labels(tmp_path):
    labels = np.arange(40) % 4
    for given in (labels[:, None], labels.astype(float), labels[:, None].astype("f4"), labels.astype(str)):
        dataset, _ = read(write_npz(tmp_path / "a.npz", images=IMAGES, labels=given))
        assert dataset.report.class_counts == dict.fromkeys("0123", 10)
    path = StoredImages.store(IMAGES, np.array([("cat", "dog")[i % 2] for i in range(40)], object))
    assert open_source(path).classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.eye(10, dtype=int)[np.arange(40) % 10], "argmax"),
        (np.tile([1, 0, 1], (40, 1)), "several labels an image"),
        (np.linspace(0, 99.3, 40), "fraction, from 0 to 99.3"),
        (np.full(40, np.nan), "NaN"),
        (np.array(["a", " "] * 20), "empty for 20 images, such as image 1"),
        (np.arange(39), "int64 39"),
    ],
)
def test_labels_that_are_no_classes_are_refused_by_what_they_are(tmp_path, labels, said):
    with pytest.raises(RequestError, match=said):
        open_source(write_npz(tmp_path / "a.npz", images=IMAGES, labels=labels))


def test_the_remedy_for_one_hot_labels_works(tmp_path):
    labels = np.eye(10)[np.arange(40) % 10]
    dataset, _ = read(write_npz(tmp_path / "a.npz", images=IMAGES, labels=labels.argmax(1)))
    assert len(dataset.train.classes) == 10


def test_labels_under_another_name_are_said(tmp_path):
    said = read(write_npz(tmp_path / "a.npz", images=IMAGES, targets=np.arange(40) % 3))[1]
    assert "targets" in said
    assert "labels" in said
    lines: list[str] = []
    rows = [{"image": image, "species": "cat"} for image in IMAGES]
    for source in ({"image": list(IMAGES), "species": ["cat"] * 40}, rows):
        assert open_source(StoredImages.store(source, report=Report(lines.append))).labels is None
        assert "'species'" in lines[-1]


def test_an_empty_text_is_no_label_as_in_a_table():
    assert open_source(StoredImages.store(list(IMAGES), [""] * 40)).labels is None
    with pytest.raises(RequestError, match="image 1 has no label"):
        StoredImages.store(list(IMAGES), ["cat", " "] * 20)


def test_a_second_name_of_a_folder_is_said_and_its_rows_in_a_table_count(tmp_path):
    pool, photos = tmp_path / "pool", tmp_path / "photos"
    fill(pool / "x", 12)
    fill(pool / "y", 12, 1)
    photos.mkdir()
    for name, place in (("a", "x"), ("b", "x"), ("d", "y")):
        (photos / name).symlink_to(pool / place)
    dataset, said = read(photos)
    assert dataset.train.classes == ("a", "d")
    assert "b/ is a/" in said
    assert "1 second name of a folder" in dataset.report.line()
    names = [f"{folder}/{i:03}.png" for folder in "bd" for i in range(12)]
    table = tmp_path / "t.jsonl"
    table.write_text("".join(json.dumps({"file_name": name, "label": name[0]}) + "\n" for name in names))
    dataset, _ = read(photos, labels=str(table))
    assert dataset.report.class_counts == {"b": 12, "d": 12}
    assert not dataset.report.skipped


def test_a_link_to_a_folder_above_hides_nothing(tmp_path):
    fill(tmp_path / "a", 5)
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert read(tmp_path)[1] == ""


def test_images_that_are_in_the_cloud_are_named(tmp_path):
    fill(tmp_path / "a", 5)
    (tmp_path / "a" / ".far.png.icloud").write_bytes(b"bplist00")
    (tmp_path / "a" / ".far.txt.icloud").write_bytes(b"bplist00")
    dataset, _ = read(tmp_path / "a")
    assert dataset.report.skipped == (("far.png", "not downloaded from iCloud"),)
    assert dataset.report.ignored == {"hidden": 1}


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    fill(tmp_path / "a", 5)
    (tmp_path / "a" / "far.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "pointer of Git LFS" in read(tmp_path / "a")[0].report.skipped[0].reason


@pytest.mark.slow
def test_columns_of_a_hugging_face_set_that_are_not_used_are_said(tmp_path):
    datasets = pytest.importorskip("datasets")
    columns = {"image": [Image.fromarray(image) for image in IMAGES], "breed": ["a", "b"] * 20}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "set")
    assert "breed" in read(tmp_path / "set")[1]


def masks(folder: Path, count: int, name: str = "{:03}.png") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        Image.fromarray((IMAGES[i, ..., 0] > 128).astype(np.uint8) * 255).save(folder / name.format(i))
    return folder


def test_the_remedy_names_the_folder_of_the_images_below_a_split_and_in_an_archive(tmp_path):
    for split in ("train", "val"):
        fill(tmp_path / "set" / split / "images", 10)
        masks(tmp_path / "set" / split / "masks", 10)
    with pytest.raises(RequestError, match="masks of the images") as refused:
        read(tmp_path / "set")
    remedy = str(refused.value).partition("Give ")[2].partition(" to train")[0]
    assert read(remedy)[0].report.used == 10
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as file:
        for path in (tmp_path / "set").rglob("*.png"):
            file.write(path, path.relative_to(tmp_path / "set"))
    with pytest.raises(RequestError, match="Unpack it, and give its folder train/images"):
        read(tmp_path / "set.zip")


def test_masks_of_a_part_of_the_images_and_names_that_say_their_role_are_seen(tmp_path):
    fill(tmp_path / "a" / "JPEGImages", 30, name="img_{:03}.png")
    masks(tmp_path / "a" / "SegmentationClass", 6, "mask_{:03}.png")
    with pytest.raises(RequestError, match="SegmentationClass look like masks"):
        read(tmp_path / "a")


def test_masks_beside_their_images_are_said(tmp_path):
    masks(fill(tmp_path / "set", 10, name="{:03}.png"), 10, "{:03}_mask.png")
    dataset, said = read(tmp_path / "set")
    assert dataset.report.used == 20
    assert "10 of 20 images look like masks" in said
    assert "000_mask.png of 000.png" in said
    assert read(fill(tmp_path / "faces", 10, name="{:03}_mask.png"))[1] == ""  # of people who wear one


@pytest.mark.parametrize(
    "names", [("-1", "0", "1"), ("A", "a", "b"), ("2020_summer", "2021_winter"), ("1_cat", "2_dog", "3_cow")]
)
def test_signs_letters_and_years_are_honest_names(tmp_path, names):
    for i, name in enumerate(names):
        fill(tmp_path / "set" / name, 8, i)
    dataset, said = read(tmp_path / "set")
    assert dataset.train.classes == tuple(sorted(names))
    assert said == ""


def test_texts_of_c_are_labels_and_objects_are_refused_with_a_remedy(tmp_path):
    texts = np.array(["a", "b"] * 20)
    dataset, _ = read(write_npz(tmp_path / "a.npz", images=IMAGES, labels=texts.astype("S")))
    assert dataset.train.classes == ("a", "b")
    with pytest.raises(RequestError, match="labels holds Python objects") as refused:
        read(write_npz(tmp_path / "b.npz", images=IMAGES, labels=texts.astype(object)))
    remedy = str(refused.value).rpartition(": ")[2]
    given = eval(remedy, {"np": np, "labels": texts.astype(object)})
    assert read(write_npz(tmp_path / "b.npz", images=IMAGES, labels=given))[0].train.classes == ("a", "b")
