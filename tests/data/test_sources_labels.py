"""Labels from a table: a CSV or JSONL file beside the images, or anywhere."""

import io
import json
import tarfile
import unicodedata
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import unfog
from conftest import FEW_PICTURES, TRANSFORMER
from image_bytes import random_png as png
from unfog.config.presets import preset
from unfog.config.requests.pack import PackRequest
from unfog.config.validate import check_request
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.base import LabelTable, Source
from unfog.data.sources.label_tables import read_table
from unfog.data.sources.labels import apply_label_table, labels_setting, read_labels
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError
from unfog.pipeline.load_data import load_images
from unfog.pipeline.pack import pack
from unfog.process.signals import StopSignals


def fill(folder: Path, names: list[str]) -> Path:
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(i))
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eight images, flat."""
    return fill(tmp_path / "photos", [f"{i}.png" for i in range(8)])


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def by_name(source: Source, mode: str) -> dict[str, str]:
    source = apply_label_table(source, mode)
    classes, labels = read_labels(source, mode)
    assert labels is not None
    return {name: classes[label] for name, label in zip(source.names, labels)}


ROWS = "".join(f"{i}.png,{('cat', 'dog')[i % 2]}\n" for i in range(8))
KINDS = {f"{i}.png": ("cat", "dog")[i % 2] for i in range(8)}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "file,label\n" + ROWS),
        ("t.csv", "\ufeffFileName,Class\n" + ROWS),
        ("t.csv", "label;width;image\n" + "".join(f"{kind};8;{name}\n" for name, kind in KINDS.items())),
        ("t.tsv", "path\tcategory\n" + ROWS.replace(",", "\t")),
        ("t.csv", "id,breed,label\n" + "".join(f'"{i}","a, b",{KINDS[f"{i}.png"]}\n' for i in range(8))),
        ("t.csv", "file,label\r\n" + ROWS.replace("\n", "\r\n")),
        ("t.csv", "file, label, said\n" + "".join(f'{n}, {k}, "a, b"\n' for n, k in KINDS.items())),
        ("t.csv", 'file;label;"notes, long, with, commas"\n' + "".join(f"{n};{k};x\n" for n, k in KINDS.items())),
        ("t.csv", "file,said,label\n" + "".join(f'{n},"a\nb",{k}\n' for n, k in KINDS.items())),
        ("t.csv", "file,said,label\n" + "".join(f"{n},a\u2028b\x0bc\x85d,{k}\n" for n, k in KINDS.items())),
        ("t.csv", "file,label\n" + ROWS.replace("\n", ",\n")),
        ("t.csv", "file;label\r\n" + ROWS.replace(",", ";") + ";\r\n ;;\r\n;\r\n"),
        ("t.jsonl", "{}\n" + "".join(json.dumps({"file": n, "label": k}) + "\n" for n, k in KINDS.items()) + "{}"),
        ("t.csv", "file,label\n" + "".join(f".\\elsewhere\\{name}, {kind} \n" for name, kind in KINDS.items())),
        ("t.jsonl", "".join(json.dumps({"file_name": n, "label": k}) + "\n" for n, k in KINDS.items()) + "\n"),
        (
            "t.jsonl",
            "".join(
                json.dumps({"file_name": n, "label": k, "said": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n"
                for n, k in KINDS.items()
            ),
        ),
    ],
)
def test_tables_as_they_are_found(photos: Path, tmp_path: Path, name: str, text: str) -> None:
    table = write(tmp_path / name, text)
    assert by_name(open_source(photos), str(table)) == KINDS


NAMED = "id,where,breed,label\n" + "".join(f"{i},{i}.png,{KINDS[f'{i}.png']},x\n" for i in range(8))
NAMED_ROWS = [dict(zip(NAMED.split()[0].split(","), row.split(","))) for row in NAMED.split()[1:]]


@pytest.mark.parametrize("columns", ["where,breed", "breed", "id, BREED"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", NAMED),
        ("t.tsv", NAMED.replace(",", "\t")),
        ("t.jsonl", "".join(json.dumps(row) + "\n" for row in NAMED_ROWS)),
    ],
)
def test_columns_of_a_table_may_be_named(photos: Path, tmp_path: Path, name: str, text: str, columns: str) -> None:
    table = f"{write(tmp_path / name, text)}:{columns}"
    assert by_name(open_source(photos), table) == KINDS
    labelled = apply_label_table(open_source(photos), table)
    setting = labels_setting(labelled, labelled.labels)
    assert by_name(open_source(photos), setting) == KINDS, "a resume has the same labels"
    other = apply_label_table(open_source(photos), str(tmp_path / f"{name}:id,label"))
    assert other.stamp() != labelled.stamp()


@pytest.mark.parametrize("columns", ["where,race", "file,breed", "race"])
def test_a_named_column_that_is_missing_is_refused_with_those_that_there_are(
    photos: Path, tmp_path: Path, columns: str
) -> None:
    table = write(tmp_path / "t.csv", NAMED)
    said = r"no column called (race|file), only id, where, breed, label; .*--data.labels t.csv:FILE,LABEL"
    with pytest.raises(RequestError, match=said):
        apply_label_table(open_source(photos), f"{table}:{columns}")


ODD = '"file, ""name""",Größe,größe\n' + "".join(f"{i}.png,{KINDS[f'{i}.png']},x\n" for i in range(8))


@pytest.mark.parametrize("label", ["Größe", "Gro\u0308ße"])
def test_named_columns_may_have_commas_quotes_and_another_form_of_unicode(
    photos: Path, tmp_path: Path, label: str
) -> None:
    text = ODD if label == "Größe" else ODD.replace(",größe", ",other")  # of two, the one that is spelled so
    labelled = apply_label_table(open_source(photos), f'{write(tmp_path / "t.csv", text)}:"file, ""name""", {label}')
    assert by_name(open_source(photos), labels_setting(labelled, labelled.labels)) == KINDS


@pytest.mark.parametrize("columns", ["where,where", "where, breed, x", "where,", ",breed", ""])
def test_columns_that_are_not_two_are_refused(photos: Path, tmp_path: Path, columns: str) -> None:
    with pytest.raises(RequestError, match=r"holds the names of the files|with columns as in t\.csv"):
        apply_label_table(open_source(photos), f"{write(tmp_path / 't.csv', NAMED)}:{columns}")


def test_whole_numbers_are_in_their_order(photos: Path, tmp_path: Path) -> None:
    table = write(tmp_path / "t.csv", "file,label\n" + "".join(f"{i}.png,{(9, 10, 100)[i % 3]}\n" for i in range(8)))
    source = apply_label_table(open_source(photos), str(table))
    assert source.classes == ("9", "10", "100")
    assert source.labels.tolist() == [i % 3 for i in range(8)]


def test_paths_below_the_source_before_base_names(tmp_path: Path) -> None:
    photos = fill(tmp_path / "photos", ["a/1.png", "b/1.png", "b/2.png"])
    paths = write(tmp_path / "paths.csv", "file,label\na/1.png,x\n./b/1.png,y\nb/2.png,x\nc/3.png,z\n")
    assert by_name(open_source(photos), str(paths)) == {"a/1.png": "x", "b/1.png": "y", "b/2.png": "x"}
    fill(photos, ["a/3.png"])
    bases = write(tmp_path / "bases.csv", "file,label\n1.png,x\n2.png,y\n3.png,x\n")
    source = apply_label_table(open_source(photos), str(bases))
    assert list(source.names) == ["a/3.png", "b/2.png"], "1.png is two images"
    # Where paths fit, a row of an image elsewhere is not taken for one of the same base name here.
    mixed = write(tmp_path / "mixed.csv", "file,label\na/1.png,x\na/3.png,x\nelsewhere/2.png,y\n")
    assert by_name(open_source(photos), str(mixed)) == {"a/1.png": "x", "a/3.png": "x"}


def test_a_row_of_another_folder_labels_nothing(tmp_path: Path) -> None:
    photos = fill(tmp_path / "photos", ["train/0.png", "train/1.png", "train/2.png", "train/3.png"])
    rows = "x/train/0.png,a\nval/1.png,b\n2.png,a\n/data/all/train/3.png,b\n"
    for text in (rows, rows.replace(".png", "")):
        table = write(tmp_path / "t.csv", "file,label\n" + text)
        source = apply_label_table(open_source(photos), str(table))
        assert list(source.names) == ["train/0.png", "train/2.png", "train/3.png"]
        assert [one.name for one in source.unreadable] == ["train/1.png", text.split("\n")[1].split(",")[0]]
    with pytest.raises(RequestError, match="no row of"):
        apply_label_table(open_source(photos), str(write(tmp_path / "t.csv", "file,label\nval/0.png,a\n")))


@pytest.mark.parametrize(("of_rows", "of_images"), [("/data/photos/", ""), ("../", ""), ("x/", "photos/x/")])
def test_folders_that_all_rows_or_all_images_share_do_not_matter(tmp_path: Path, of_rows: str, of_images: str) -> None:
    names = [f"{folder}/{i}.png" for folder in "ab" for i in range(3)]
    photos = fill(tmp_path / "photos", [of_images + name for name in names])
    (photos / of_images / "a/unlike.png").write_bytes(png(9))  # its base name alone is nobody else's
    kinds = {name: name[0] + name[-5] for name in [*names, "a/unlike.png"]}
    rows = "".join(f"{of_rows}{name},{kind}\n" for name, kind in kinds.items())
    table = write(tmp_path / "t.csv", "file,label\n" + rows)
    assert by_name(open_source(photos), str(table)) == {of_images + name: kind for name, kind in kinds.items()}


@pytest.mark.parametrize(("on_disk", "in_table"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_accents_match_however_they_are_composed(tmp_path: Path, on_disk: str, in_table: str) -> None:
    names = [f"é/ü{i}.png" for i in range(8)]
    photos = fill(tmp_path / "photos", [unicodedata.normalize(on_disk, name) for name in names])
    rows = "".join(f"{unicodedata.normalize(in_table, name)},{i % 2}\n" for i, name in enumerate(names))
    write(photos / "labels.csv", "file,label\n" + rows)
    found = by_name(open_source(photos), "auto")
    assert found == {unicodedata.normalize(on_disk, name): str(i % 2) for i, name in enumerate(names)}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ROWS[: len("0.png,cat\n") * 3], "names only 3 of the 8 images of .*: none is '3.png'; .* empty label"),
        (
            ROWS.replace("png", "jpg").replace("0.jpg", "0.png"),
            r"names only 1 of the 8 images of .*: rows are such as '1\.jpg', images such as '1\.png'",
        ),
    ],
)
def test_a_table_of_fewer_than_half_the_images_is_refused(photos: Path, tmp_path: Path, rows: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        apply_label_table(open_source(photos), str(write(tmp_path / "t.csv", "file,label\n" + rows)))


def test_what_has_no_partner_is_named_and_counted(photos: Path, tmp_path: Path) -> None:
    table = write(tmp_path / "t.csv", "file,label\n" + ROWS.replace("3.png,dog\n", "").replace("4.png,cat", "4.png,"))
    with table.open("a") as file:
        file.write("gone.png,cat\n")
    prepared = prepare(open_source(photos), Data(labels=str(table)))
    assert [tuple(one) for one in prepared.report.skipped] == [
        ("3.png", "without a label in t.csv"),
        ("4.png", "without a label in t.csv"),
        ("gone.png", "named in t.csv and not there"),
    ]
    assert "2 without a label in t.csv: 3.png, 4.png" in prepared.report.line()
    assert prepared.train.classes == ("cat", "dog")
    assert list(prepared.train.names) == [f"{i}.png" for i in (0, 1, 2, 5, 6, 7)]
    assert prepared.train.labels is not None
    assert prepared.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert prepared.settings.labels == str(table)
    for i, name in enumerate(prepared.train.names):
        want = np.asarray(Image.open(photos / name)).transpose(2, 0, 1)
        assert np.array_equal(prepared.train.pixels[i], want)


def test_very_many_rows_without_images_are_not_all_named(photos: Path, tmp_path: Path) -> None:
    table = write(tmp_path / "t.csv", "file,label\n" + ROWS + "".join(f"x{i}.png,cat\n" for i in range(3000)))
    unreadable = apply_label_table(open_source(photos), str(table)).unreadable
    assert len(unreadable) == 1001
    assert unreadable[-1].name == "2,000 more"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "file,label\na.png,cat\n",
            r"no row of .*names an image of .*: rows are such as 'a.png', images such as '0.png'",
        ),
        (
            "file,caption\n0.png,a cat\n",
            r"no column of labels, only file, caption; --condition caption learns its captions; or call one label",
        ),
        ("where,label\n0.png,cat\n", r"no column of file names, only where, label; call one file_name"),
        ("file,label\n0.png,cat\n0.png,dog\n", r"calls 0.png both cat and dog; keep one row"),
        ("", "has no rows"),
        ("file,label\n", "has no rows"),
        ("file,label\n" + "".join(f"{i}.png,\n" for i in range(8)), "leaves every label empty"),
        ("file,label\n,cat\n", "has a row of file  and label cat; each needs a name"),
        ('file,label\n"0.png,cat\n', "is damaged: unexpected end of data"),
        ("file,label\n0.png,cat\n1.png,cat, black\n", "has 3 fields in line 3 and 2 in its header; put quotes around"),
        ("file,label,Label \n0.png,cat,dog\n", "has 2 columns called label; keep one"),
        ("file,label,label\n0.png,cat,dog\n", "has 2 columns called label; keep one"),
        ("file,file,label\n0.png,1.png,dog\n", "has 2 columns called file; keep one"),
    ],
)
def test_tables_that_will_not_do(photos: Path, tmp_path: Path, text: str, said: str) -> None:
    table = write(tmp_path / "t.csv", text)
    with pytest.raises(RequestError, match=said):
        apply_label_table(open_source(photos), str(table))


def test_damaged_tables_end_in_a_line(photos: Path, tmp_path: Path) -> None:
    for name, content, said in (
        ("a.csv", b"file,label\n\xff\xfe.png,cat\n", r"not text in UTF-8 \(line 2, byte 12\); save it as UTF-8"),
        ("a.jsonl", b'{"file": "0.png", "label": "a"}\n{"file": x}\n', r"Expecting value in line 2, character 10"),
        ("a.jsonl", b'{"file": "0.png",\n"label": "caf\xe9"}\n', r"not text in UTF-8 \(line 2, byte 32\)"),
        ("a.jsonl", b'{"file": "0.png"', "is damaged"),
        ("a.jsonl", b"[1, 2]\n", "line 1 is not an object in braces"),
        ("a.jsonl", b'{"file": "0.png", "label": ["cat", "dog"]}', "one label, a text or a whole number"),
        ("a.jsonl", b"[" * 100_000, "is damaged"),
        ("a.csv", b"file,label\n" + b"x" * 200_000 + b",cat\n", "a cell of more than 131,072 characters; shorten it"),
        ("a.csv", b"file,label\n0.png\0,cat\n", "is damaged|no row of"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RequestError, match=said):
            apply_label_table(open_source(photos), str(tmp_path / name))
    with pytest.raises(RequestError, match=r"labels = .*none\.csv does not exist"):
        apply_label_table(open_source(photos), str(tmp_path / "none.csv"))


def test_a_table_at_the_top_of_a_folder_is_found(photos: Path) -> None:
    write(photos / "metadata.csv", "file_name,label\n" + ROWS)
    assert by_name(open_source(photos), "auto") == KINDS
    prepared = prepare(open_source(photos), Data())
    assert prepared.train.classes == ("cat", "dog")
    assert prepared.settings.labels == str(photos / "metadata.csv")
    assert prepare(open_source(photos), prepared.settings).train.fingerprint == prepared.train.fingerprint
    assert prepare(open_source(photos), Data(labels="none")).train.labels is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file_name,text\n" + ROWS, "it has no column of labels, only file_name, text"),  # captions
        (  # those, too
            "file_name,label\n" + "".join(f"{i}.png,number {i}\n" for i in range(8)),
            "it has 8 classes for 8 images, fewer than four images each; --data.labels metadata.csv uses",
        ),
        ("file_name,label\n" + "".join(f"{i}.png,cat\n" for i in range(8)), "it has only the class cat"),
        ("file_name,label\n" + ROWS[:-1] + ";\n3.png,cat\n", "it calls 3.png both dog and cat; keep one row"),
        ("", "it has no rows"),
    ],
)
def test_a_table_of_something_else_is_left_out_and_said_to_be(photos: Path, text: str, said: str) -> None:
    write(photos / "metadata.csv", text)
    source = open_source(photos)
    lines: list[str] = []
    assert apply_label_table(source, "auto", lines.append) is source
    (line,) = lines
    assert line.startswith(f"metadata.csv is ignored: {said}")
    assert prepare(source, Data()).warnings == (line,)
    assert prepare(source, Data(labels="none")).warnings == ()


def test_a_run_and_a_pack_warn_of_a_table_left_out(
    photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(photos / "labels.csv", "file,label\n" + ROWS.replace("3.png,dog\n", ""))
    said = (
        "warning: labels.csv is ignored: it has no label for 1 of 8 images, such as 3.png; "
        "--data.labels labels.csv uses it all the same"
    )
    config = replace(preset("default"), source=str(photos), data=Data(size=8))
    assert load_images(config, StopSignals())[0].train.classes == ()
    assert capfd.readouterr().err.splitlines().count(said) == 1
    pack(PackRequest(config.source, tmp_path / "packed", config.data))
    assert capfd.readouterr().err.splitlines().count(said) == 1


def test_of_two_tables_the_other_is_said_to_be_left_out(photos: Path) -> None:
    write(photos / "metadata.csv", "file_name,label\n" + ROWS)
    write(photos / "labels.csv", "file,label\n" + ROWS)
    lines: list[str] = []
    assert apply_label_table(open_source(photos), "auto", lines.append).classes == ("cat", "dog")
    assert lines == [
        "labels.csv is ignored: metadata.csv has the labels; --data.labels labels.csv uses it all the same"
    ]


def test_a_table_that_would_lose_images_is_not_used_unasked(tmp_path: Path) -> None:
    photos = fill(tmp_path / "photos", [f"{i}.png" for i in range(12)])
    rows = "".join(f"{i}.png,{i % 2}\n" for i in range(12))
    table = write(photos / "metadata.csv", "file_name,label\n" + rows)
    assert len(apply_label_table(open_source(photos), "auto").classes) == 2
    write(table, "file_name,label\n" + rows.replace("3.png,1\n", ""))
    assert apply_label_table(open_source(photos), "auto").classes == ()
    assert len(apply_label_table(open_source(photos), str(table)).classes) == 2


def test_folders_that_are_classes_come_before_a_table(tmp_path: Path) -> None:
    photos = fill(tmp_path / "photos", [f"{kind}/{i}.png" for kind in "ab" for i in range(4)])
    rows = "".join(f"{kind}/{i}.png,{i % 2}\n" for kind in "ab" for i in range(4))
    write(photos / "metadata.csv", "file_name,label\n" + rows)
    assert set(by_name(open_source(photos), "auto").values()) == {"a", "b"}
    (line,) = prepare(open_source(photos), Data()).warnings
    assert line.startswith("metadata.csv is ignored: the folders are the classes; --data.labels metadata.csv")
    assert set(by_name(open_source(photos), str(photos / "metadata.csv")).values()) == {"0", "1"}


def test_a_table_that_moved_with_its_folder_is_found(photos: Path, tmp_path: Path) -> None:
    write(photos / "labels.csv", "file,label\n" + ROWS)
    photos.rename(tmp_path / "moved")
    assert by_name(open_source(tmp_path / "moved"), str(photos / "labels.csv")) == KINDS


def test_a_changed_table_is_another_state(photos: Path, tmp_path: Path) -> None:
    table = write(tmp_path / "t.csv", "file,label\n" + ROWS)
    before = prepare(open_source(photos), Data(labels=str(table), cache="disk"))
    stamp = apply_label_table(open_source(photos), str(table)).stamp()
    write(table, "file,label\n" + ROWS.replace("cat", "bat"))
    assert apply_label_table(open_source(photos), str(table)).stamp() != stamp
    after = prepare(open_source(photos), Data(labels=str(table), cache="disk"))
    assert (before.train.classes, after.train.classes) == (("cat", "dog"), ("bat", "dog"))


def test_tables_label_zips_and_shards_too(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive, tarfile.open(tmp_path / "b.tar", "w") as shard:
        for i in range(8):
            archive.writestr(f"in/{i}.png", png(i))
            info = tarfile.TarInfo(f"in/{i}.png")
            info.size = len(png(i))
            shard.addfile(info, io.BytesIO(png(i)))
    for text in (ROWS, "".join(f"in/{line}\n" for line in ROWS.splitlines())):
        table = write(tmp_path / "t.csv", "file,label\n" + text)
        for name in ("a.zip", "b.tar"):
            found = by_name(open_source(tmp_path / name), str(table))
            assert {image.rpartition("/")[2]: kind for image, kind in found.items()} == KINDS


@pytest.mark.parametrize("inside", ["", "photos/"])
def test_a_table_in_a_zip_is_found_as_in_its_folder(tmp_path: Path, inside: str) -> None:
    path = tmp_path / "photos.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(8):
            archive.writestr(f"{inside}images/{i}.png", png(i))
        archive.writestr(f"{inside}labels.csv", "file,label\n" + "".join(f"images/{line}\n" for line in ROWS.split()))
        archive.writestr(f"{inside}images/deep/metadata.csv", "file,label\n0.png,cat\n")
    kinds = {f"{inside}images/{name}": kind for name, kind in KINDS.items()}
    assert by_name(open_source(path), "auto") == by_name(open_source(path), "labels.csv") == kinds
    prepared = prepare(open_source(path), Data())
    assert prepared.warnings == ()
    assert prepared.settings.labels == f"{path}/{inside}labels.csv"
    assert prepare(open_source(path), prepared.settings).train.fingerprint == prepared.train.fingerprint
    check_request(replace(preset("default"), source=str(path), data=Data(labels="labels.csv")))
    with pytest.raises(RequestError, match=r"labels = kinds\.csv does not exist"):
        apply_label_table(open_source(path), "kinds.csv")


def test_a_table_in_a_zip_that_cannot_be_read_is_said_to_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "photos.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(8):
            archive.writestr(f"{i}.png", png(i))
        archive.writestr("labels.csv", "file,label\n" + ROWS, zipfile.ZIP_BZIP2)
    (line,) = prepare(open_source(path), Data()).warnings
    assert line.startswith("labels.csv is ignored: it cannot be read (packed by method 12, not deflate)")


def test_what_labels_may_be() -> None:
    for mode in ("auto", "folders", "none", "a.csv", "b/c.JSONL", "x.tsv", "a.csv:id,breed", "x.jsonl:breed"):
        assert Data(labels=mode).labels == mode
    with pytest.raises(RequestError, match="did you mean folders"):
        Data(labels="folder")
    with pytest.raises(RequestError, match=r"is not auto, folders, none"):
        Data(labels="photos/")


@pytest.mark.slow
def test_a_table_of_many_rows_is_quick(tmp_path: Path) -> None:
    rows = "".join(f"{i:06}.png,{i % 7}\n" for i in range(50_000))
    found, *_ = read_table(LabelTable.from_path(write(tmp_path / "t.csv", "file,label\n" + rows)))
    assert len(found) == 50_000


@pytest.mark.slow
def test_train_with_a_relative_table_and_resume_from_elsewhere(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "kinds.csv", "file,label\n" + ROWS)
    monkeypatch.chdir(tmp_path)
    settings = {"size": 8, "batch": 4, "network": TRANSFORMER, "device": "cpu", "precision": "fp32", **FEW_PICTURES}
    run = unfog.train("photos", out="run", steps=2, data={"labels": "kinds.csv"}, **settings)
    assert tuple(run.classes) == ("cat", "dog")
    assert f'labels = "{tmp_path / "kinds.csv"}"' in (tmp_path / "run/config.toml").read_text()
    monkeypatch.chdir(photos)
    assert tuple(unfog.resume(tmp_path / "run", steps=3).classes) == ("cat", "dog")
    write(tmp_path / "kinds.csv", "file,label\n" + ROWS.replace("0.png,cat", "0.png,dog"))
    with pytest.raises(RequestError, match="are not those that this run was trained on"):
        unfog.resume(tmp_path / "run", steps=4)


def test_a_labelled_source_is_a_source(photos: Path, tmp_path: Path) -> None:
    table = write(tmp_path / "t.csv", "file,label\n" + ROWS)
    source = apply_label_table(open_source(photos), str(table))
    assert labels_setting(source, source.labels) == str(table)
    assert apply_label_table(source, str(table)) is source
    assert (source.name, source.resolved) == (str(photos), str(photos))
    assert read_labels(source, "none") == ((), None)
    assert source.stamp()[1] == open_source(photos).stamp()[1]


def test_a_missing_table_is_said_before_any_work(photos: Path, tmp_path: Path) -> None:
    config = replace(preset("default"), source=str(photos), data=Data(labels=str(tmp_path / "kinds.csv")))
    with pytest.raises(RequestError, match=r"kinds\.csv does not exist"):
        check_request(config)
    write(photos / "kinds.csv", "file,label\n" + ROWS)
    check_request(config)
