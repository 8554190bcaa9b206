"""Values beside images of every kind of source become conditions: parquet, Hugging Face, shards, Python objects."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from image_bytes import png
from unfog.data.columns.conditions import with_conditions
from unfog.data.scan import Scan
from unfog.data.settings import Data
from unfog.data.sources.base import LabelTable
from unfog.data.sources.label_tables import match_rows
from unfog.data.sources.labels import AUTO_TABLES
from unfog.data.sources.registry import open_source
from unfog.data.webdataset import metadata
from unfog.errors import RequestError
from unfog.from_python import training_settings

COUNT = 12
AGES = [None if i == 5 else 20 + i for i in range(COUNT)]
STAINS = ["HE" if i % 3 else "PAS" for i in range(COUNT)]
NAMES = [f"{i:02}.png" for i in range(COUNT)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))


def picture(i):
    return Image.new("L", (8, 8), 20 * i)


def folder(path):
    path.mkdir()
    for i, name in enumerate(NAMES):
        picture(i).save(path / name)
    return path


def check(columns, names=("age", "stain")):
    """Check that the columns are those of the images in the order of NAMES."""
    assert set(columns) == {*names}
    if "age" in columns:
        assert columns["age"].kind == "number"
        np.testing.assert_array_equal(columns["age"].values, [np.nan if age is None else age for age in AGES])
    if "stain" in columns:
        assert [columns["stain"].categories[k] for k in columns["stain"].values] == STAINS


def scanned(source, condition="age,stain", **settings):
    return Scan.create(open_source(str(source)), Data(condition=condition, **settings))


def of_python(images, **settings):
    config = training_settings(images, "default", settings)
    return Scan.create(open_source(config.source), config.data)


@pytest.fixture
def hf():
    return pytest.importorskip("datasets")


def dataset(hf, **more):
    columns = {"image": [picture(i) for i in range(COUNT)], "age": AGES, "stain": STAINS, **more}
    return hf.Dataset.from_dict(columns).cast_column("image", hf.Image())


def test_a_parquet_table_beside_the_images(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder(tmp_path / "cells")
    order = [7, *range(7), *range(8, COUNT)]
    table = {
        "file_name": [NAMES[i] for i in order],
        "age": [AGES[i] for i in order],
        "stain": [STAINS[i] for i in order],
    }
    pq.write_table(pa.table({**table, "text": ["long"] * COUNT}), path / "metadata.parquet")
    assert "metadata.parquet" in AUTO_TABLES
    check(scanned(path).columns)
    (path / "metadata.parquet").rename(tmp_path / "t.parquet")
    check(scanned(path, f"{tmp_path / 't.parquet'}:age,stain").columns)
    with pytest.raises(RequestError, match="no column 'agee'; did you mean 'age'"):
        scanned(path, f"{tmp_path / 't.parquet'}:agee")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(RequestError, match="is damaged"):
        scanned(path, f"{tmp_path / 't.parquet'}:age")


def test_a_parquet_table_may_hold_labels(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder(tmp_path / "cells")
    pq.write_table(pa.table({"file_name": NAMES, "label": STAINS}), path / "metadata.parquet")
    assert scanned(path, "").classes == ("HE", "PAS")


def test_a_parquet_table_that_unpacks_to_gigabytes_is_refused(tmp_path, monkeypatch):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("unfog.data.sources.label_tables._MOST_UNPACKED", 2**20)
    pq.write_table(pa.table({"file_name": ["x" * 5000] * 1000, "age": [1] * 1000}), tmp_path / "t.parquet")
    with pytest.raises(RequestError, match="unpacks to over"):
        scanned(folder(tmp_path / "cells"), f"{tmp_path / 't.parquet'}:age")


def test_columns_of_a_hugging_face_dataset(tmp_path, hf):
    dataset(hf).save_to_disk(tmp_path / "saved")
    check(scanned(tmp_path / "saved").columns)
    dataset(hf).to_parquet(tmp_path / "set.parquet")
    check(scanned(tmp_path / "set.parquet", "age").columns, ["age"])
    with pytest.raises(RequestError, match="it has age, stain"):
        scanned(tmp_path / "saved", "size")


def test_a_label_that_is_a_condition_is_no_class_as_well(tmp_path, hf):
    labels = hf.ClassLabel(names=["HE", "PAS"])
    dataset(hf, label=[labels.str2int(one) for one in STAINS]).cast_column("label", labels).save_to_disk(
        tmp_path / "set"
    )
    assert scanned(tmp_path / "set", "age").classes == ("HE", "PAS")
    scan = scanned(tmp_path / "set", "label")
    assert scan.classes == ()
    assert scan.columns["label"].categories == ("HE", "PAS")


def tar(path, files):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def shards(path, values):
    """Write two shards whose images have .json members of these values, a dict or None for each."""
    for k, part in enumerate((range(5), range(5, COUNT))):
        files = []
        for i in part:
            files += [(f"{i:02}.json", json.dumps(values[i]).encode())] * (values[i] is not None)
            files.append((f"{i:02}.img.png", png(picture(i))))
        tar(path / f"s-{k}.tar", files)
    return path


def test_json_members_of_shards(tmp_path, monkeypatch):
    values = [{"age": age, "stain": stain, "url": "…"} for age, stain in zip(AGES, STAINS)]
    path = shards(tmp_path / "shards", values)
    check(scanned(path).columns)
    scans = []
    monkeypatch.setattr(metadata, "_scan", lambda *given: scans.append(given))
    check(scanned(path).columns)
    assert not scans, "the values are in the cache"
    monkeypatch.undo()
    with pytest.raises(RequestError, match="it has age, stain, url"):
        scanned(path, "size")


def test_images_of_shards_without_a_json_member_are_not_known(tmp_path):
    path = shards(tmp_path / "shards", [None if i == 6 else {"age": i} for i in range(COUNT)])
    assert np.flatnonzero(np.isnan(scanned(path, "age").columns["age"].values)).tolist() == [6]


def test_members_of_shards_that_a_suffix_names(tmp_path):
    files = [(f"a/{i:02}.png", png(picture(i))) for i in range(COUNT)]
    files += [(f"a/{i:02}.age", str(age).encode()) for i, age in enumerate(AGES) if age is not None]
    tar(tmp_path / "set" / "s.tar", files)
    check(scanned(tmp_path / "set" / "s.tar", "age").columns, ["age"])


def test_shards_whose_json_is_odd_are_read_all_the_same(tmp_path):
    values = [3, [], "x", {"age": 1}, {"age": "2"}, {"age": {"b": 1}}, *({"age": i} for i in range(6))]
    path = shards(tmp_path / "shards", values)
    with pytest.raises(RequestError, match="mixes"):
        scanned(path, "age")
    values[4:6] = [{"age": 2}, {"name": "x"}]
    path = shards(tmp_path / "others", values)
    assert np.isnan(scanned(path, "age").columns["age"].values[:6]).tolist() == [True] * 3 + [False] * 2 + [True]


def test_objects_with_values_beside_them():
    images = [picture(i) for i in range(COUNT)]
    check(of_python(images, conditions={"age": AGES, "stain": np.array(STAINS)}).columns)
    check(of_python(iter(images), conditions={"age": AGES}).columns, ["age"])
    kept = of_python([(image, i % 2) for i, image in enumerate(images)], conditions={"age": AGES})
    check({"age": kept.columns["age"]}, ["age"])
    assert kept.classes == ("0", "1")
    with pytest.raises(RequestError, match="11 values, and there are 12 images"):
        of_python(images, conditions={"age": AGES[1:]})
    with pytest.raises(RequestError, match="holds a object"):
        of_python(images, conditions={"age": [object()] * COUNT})


def test_the_same_objects_with_other_values_are_another_set():
    images = [picture(i) for i in range(COUNT)]
    first, second = (
        training_settings(images, "default", {"conditions": {"age": ages}}).source for ages in (AGES, AGES[::-1])
    )
    assert first != second


def test_arrays_have_an_image_for_each_image():
    images = [np.zeros((8, 6, 3), np.uint8) + i for i in range(COUNT)]
    for source, count in ((np.stack(images), 11), (images, 13), (iter(images), 0)):
        with pytest.raises(RequestError, match=f"mask has {count} images"):
            of_python(source, conditions={"mask": np.zeros((count, 8, 6), bool)})
    assert of_python(images, conditions={"mask": np.ones((COUNT, 8, 6), bool)}).second


def test_items_that_are_dictionaries_have_values():
    items = [{"image": picture(i), "age": AGES[i], "stain": STAINS[i], "label": i % 2} for i in range(COUNT)]
    scan = of_python(items, condition="age,stain")
    check({name: scan.columns[name] for name in ("age", "stain")})
    assert scan.classes == ("0", "1")
    assert of_python(items, condition="label").classes == ()
    with pytest.raises(RequestError, match="no such column"):
        of_python(items, condition="size")


def test_tables_of_python_have_values():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"image": [picture(i) for i in range(COUNT)], "age": AGES, "stain": STAINS})
    check(of_python(table, condition="age,stain").columns)
    check(of_python([picture(i) for i in range(COUNT)], conditions=table[["age", "stain"]]).columns)


def test_a_dataset_in_memory_has_values(hf):
    check(of_python(dataset(hf), condition="age,stain").columns)


def test_paths_and_a_torch_dataset_have_values(tmp_path):
    path = folder(tmp_path / "cells")
    check(of_python([path / name for name in NAMES], conditions={"age": AGES}).columns, ["age"])

    class Pairs:
        def __len__(self):
            return COUNT

        def __getitem__(self, i):
            return np.full((8, 8, 1), i, np.uint8), 0

    check({"age": of_python(Pairs(), conditions={"age": AGES}).columns["age"]}, ["age"])


def test_conditions_of_files_are_given_by_name(tmp_path):
    pandas = pytest.importorskip("pandas")
    path = folder(tmp_path / "cells")
    ages = dict(zip(NAMES[::-1], AGES[::-1]))
    check(of_python(path, conditions={"age": ages, "stain": dict(zip(NAMES, STAINS))}).columns)
    check(of_python(path, conditions=pandas.DataFrame({"file_name": NAMES, "age": AGES, "stain": STAINS})).columns)
    stains = {"stain": dict(zip(NAMES, STAINS))}
    for settings in ({"condition": "stain:several"}, {"data": {"condition": "stain:several"}}):
        assert of_python(path, conditions=stains, **settings).columns["stain"].kind == "several"
    with pytest.raises(RequestError, match="given by name"):
        of_python(path, conditions={"age": AGES})
    with pytest.raises(RequestError, match="names a table"):
        of_python(path, conditions={"age": ages}, condition="t.csv:age")


def numbered(path, column="label", each=4):
    """Return a folder with a table in which a column has many numbers, of so many images each."""
    path.mkdir()
    rows = [f"file_name,{column}"]
    for i in range(24 * each):
        Image.new("L", (8, 8), i).save(path / f"{i:03}.png")
        rows.append(f"{i:03}.png,{i // each + 20}")
    (path / "metadata.csv").write_text("\n".join(rows))
    return path


@pytest.mark.parametrize("each", [4, 5])
def test_numbers_as_classes_are_noticed_and_the_remedy_works(tmp_path, each):
    path = numbered(tmp_path / "a", "class_id", each)
    scan = scanned(path, "")
    assert len(scan.classes) == 24
    assert any("--condition class_id learns them as a number" in line for line in scan.warnings)
    scan = scanned(path, "class_id")
    assert scan.classes == ()
    assert scan.columns["class_id"].kind == "number"
    assert not scan.warnings


def test_numbers_as_labels_of_an_array_become_a_condition(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((60, 8, 8), np.uint8), y=np.arange(60))
    scan = scanned(tmp_path / "a.npz", "")
    assert any("--condition y learns them" in line for line in scan.warnings)
    scan = scanned(tmp_path / "a.npz", "y")
    assert scan.columns["y"].kind == "number"
    images = [Image.new("L", (8, 8), i) for i in range(60)]
    scan = of_python(images, labels=list(range(60)))
    assert any("--condition label learns them" in line for line in scan.warnings)
    assert of_python(images, labels=list(range(60)), condition="label").columns["label"].kind == "number"


@pytest.mark.parametrize("suffix", [".nii.gz", ".nii", ".dcm", ".NII.GZ", ".fits"])
def test_rows_may_name_scans_without_their_suffix(suffix):
    names = [f"p{i}/scan.{i}{suffix}" for i in range(3)]
    row_of, unmatched = match_rows(names, [f"scan.{i}" for i in range(3)])
    assert row_of == {i: f"scan.{i}" for i in range(3)}
    assert not unmatched


def csv(text):
    return LabelTable("t.csv", "/t.csv", lambda: text if isinstance(text, bytes) else text.encode())


def cells(text, wanted=("age",)):
    from unfog.data.sources.label_tables import read_cells

    return read_cells(csv(text), wanted)


def test_csv_files_of_every_program_are_read():
    plain = {"a.png": ("1",), "b.png": ("2",)}
    rows = ["a.png,1", "b.png,2"]
    assert cells("\ufefffile_name,age\n" + "\n".join(rows)) == plain
    assert cells("file_name;age\r\na.png;1\r\nb.png;2\r\n") == plain
    assert cells('file_name,note,age\na.png,"two\nlines, one",1\nb.png,"""q""",2\n') == plain
    assert cells("file_name,age\n\n,\n" + "\n".join(rows) + "\n , \n") == plain
    for text, said in (
        ("file_name,age,age\na.png,1,2", "2 columns called age"),
        ("file_name,age\na.png,1\na.png,2", "two rows of a.png"),
        ("file_name,age\na.png,1,2", "3 fields in line 2"),
        ('file_name,age\na.png,"1\n', "damaged"),
        (b"file_name,age\na.png,\xff", "not text in UTF-8"),
        ("file_name,ag\0e\na.png,1", "no column 'age'"),
        ("", "no rows"),
    ):
        with pytest.raises(RequestError, match=said):
            cells(text)


def test_a_cell_with_a_nul_byte_is_a_text_and_no_number(tmp_path):
    path = folder(tmp_path / "a")
    (path / "metadata.csv").write_text("file_name,age\n" + "\n".join(f"{n},1\0{i}" for i, n in enumerate(NAMES)))
    with pytest.raises(RequestError, match="12 different values"):
        with_conditions(open_source(str(path)), "age")


@pytest.mark.slow
def test_a_table_of_two_hundred_thousand_columns_is_read():
    header = ",".join(["file_name", "age", *(f"c{i}" for i in range(200_000))])
    row = ",1" + "," * 200_000
    found = cells("\n".join([header, *(f"{name}{row}" for name in NAMES)]))
    assert found == dict.fromkeys(NAMES, ("1",))
