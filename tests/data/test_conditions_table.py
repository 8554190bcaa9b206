"""Columns of tables and arrays as conditions: their kinds, and what is refused."""

import json

import numpy as np
import pytest
from PIL import Image

from unfog.data.columns.conditions import resolved_condition, with_conditions
from unfog.data.columns.kinds import column_of
from unfog.data.scan import Scan
from unfog.data.settings import Data, parse_condition
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError
from unfog.values.condition_format import facts_of

NAMES = [f"{i:02}.png" for i in range(12)]


def cycle(*cells):
    return [cells[i % len(cells)] for i in range(12)]


def folder(path, table="", count=12):
    path.mkdir()
    for name in NAMES[:count]:
        Image.new("L", (8, 8)).save(path / name)
    if table:
        (path / "metadata.csv").write_text(table)
    return path


def table_of(names, header="file_name,age", cell=str):
    return "\n".join([header, *(f"{name},{cell(i)}" for i, name in enumerate(names))]) + "\n"


@pytest.mark.parametrize(
    ("cells", "kind", "first"),
    [
        (cycle("20", "30.5", "-1e2", ""), "number", 20),
        (cycle("0", "1"), "category", 0),
        (cycle(True, False), "category", 1),
        (cycle("HE", " PAS ", "NA"), "category", 0),
        (cycle("red;round", "red", "", ";"), "several", [1, 1]),
        (cycle(["b", "a"], [], ["a"]), "several", [1, 1]),
        (cycle('["b", "a"]', "[]"), "several", [1, 1]),
        (cycle("0.5;1", "2;3"), "vector", [0.5, 1]),
        (cycle([1, 2, 3], None, [4, 5, 6]), "vector", [1, 2, 3]),
        (cycle("[1, 2]", "[3, 4]"), "vector", [1, 2]),
    ],
)
def test_a_kind_is_found_by_the_cells(cells, kind, first):
    column = column_of("c", cells, NAMES)
    assert column.kind == kind
    assert np.array_equal(column.values[0], first)
    (facts,) = facts_of([column])
    assert facts.kind == kind


def test_cells_without_a_value_are_not_known():
    number, category, several, vector = (
        column_of("c", cells, NAMES).values[1]
        for cells in (cycle(1.5, None, 3), cycle("a", "n/a", "b"), cycle("a;b", "", "a"), cycle([1, 2], None, [3, 4]))
    )
    assert np.isnan(number)
    assert category == -1
    assert several.tolist() == [-1, -1]
    assert np.isnan(vector).all()
    assert column_of("c", cycle("a;b", ";"), NAMES).values[1].tolist() == [0, 0], "none of them is known"


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (cycle("", "NA", None), "empty for all"),
        (cycle("7"), "'7' for all"),
        (cycle("a"), "'a' for all"),
        (cycle("41", "old"), "mixes.*age:category"),
        (cycle([1], "a"), "mixes"),
        (cycle([1, 2], [3]), "a vector has the same number"),
        (cycle("inf", "1"), "too large"),
        ([f"caption {i}" for i in range(12)], "12 different values"),
        (NAMES, "names of files"),
        ([name[:2] + "x" for name in NAMES], "12 different"),
        (cycle([1], [[2]]), "--condition age=FILE"),
        (cycle(*[list(range(600)), list(range(1, 601))]), "1 to 512"),
    ],
)
def test_a_column_that_is_no_condition_is_refused_with_the_reason(cells, said):
    with pytest.raises(RequestError, match=said):
        column_of("age", cells, NAMES)


def test_ten_thousand_categories_are_refused():
    cells = [f"c{i // 3}" for i in range(30_000)]
    with pytest.raises(RequestError, match="10,000 different values"):
        column_of("c", cells, [str(i) for i in range(30_000)])


def test_a_kind_that_is_asked_for_is_used():
    assert column_of("c", cycle("3", "1", "20"), NAMES, "category").categories == ("1", "3", "20")
    assert column_of("c", cycle("a", "b"), NAMES, "several").values.shape == (12, 2)
    with pytest.raises(RequestError, match=r"'b' for 01\.png, which is not a number"):
        column_of("c", cycle("1", "b"), NAMES, "number")


def test_rows_are_matched_by_name_whatever_their_order(tmp_path):
    source = open_source(str(folder(tmp_path / "a", table_of(NAMES[::-1]))))
    ages = with_conditions(source, "age").columns["age"].values
    assert ages.tolist() == list(range(11, -1, -1))
    assert source.columns == {}, "the source may be opened for other settings"


def test_json_lines_hold_lists(tmp_path):
    path = folder(tmp_path / "a")
    rows = [{"file_name": name, "v": [i, 2 * i], "tags": ["x"] * (i % 2)} for i, name in enumerate(NAMES)]
    (path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = Scan.create(open_source(str(path)), Data(condition="v,tags")).columns
    assert {name: column.kind for name, column in columns.items()} == {"tags": "several", "v": "vector"}


def test_images_without_a_row_are_counted_and_not_known(tmp_path):
    warnings = []
    source = open_source(str(folder(tmp_path / "a", table_of(NAMES[:9]))))
    ages = with_conditions(source, "age", warnings.append).columns["age"].values
    assert np.isnan(ages[9:]).all()
    assert "no row for 3 of 12 images" in warnings[0]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (table_of([*NAMES, *(f"other{i}.png" for i in range(12))]), "24 rows, and 12 of them name no image"),
        (table_of([f"x{i}.png" for i in range(12)]), "no row of"),
        (table_of(NAMES[:5]), "names only 5 of the 12"),
        (table_of([*NAMES, NAMES[0]]), "two rows of 00.png"),
        (table_of(NAMES, "file_name,years"), "no column 'age'"),
        (table_of(NAMES, "file_name,age,age", lambda i: f"{i},{i}"), "2 columns called age"),
        (table_of(NAMES, "a,age"), "no column of file names"),
        ("", "no metadata.csv"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table, said, tmp_path):
    source = open_source(str(folder(tmp_path / "a", table)))
    with pytest.raises(RequestError, match=said):
        with_conditions(source, "age")


def test_a_column_that_is_advised_has_not_the_name_of_a_file(tmp_path):
    with pytest.raises(RequestError, match=r"amp\.npy.*no such column.*--condition TABLE\.csv:amp$"):
        with_conditions(open_source(str(folder(tmp_path / "a"))), "amp.npy")


def test_a_table_of_a_million_columns_has_a_short_message(tmp_path):
    names = ",".join(f"c{i}" for i in range(1_000_000))
    path = folder(tmp_path / "a", f"file_name,{names}\n")
    with pytest.raises(RequestError) as error:
        with_conditions(open_source(str(path)), "age")
    assert len(str(error.value)) < 1000


def test_a_table_elsewhere_is_named_by_its_path(tmp_path, monkeypatch):
    path = folder(tmp_path / "a")
    (tmp_path / "t.csv").write_text(table_of(NAMES))
    monkeypatch.chdir(tmp_path)
    assert with_conditions(open_source("a"), "t.csv:age:number").columns["age"].values.tolist() == list(range(12))
    assert resolved_condition("t.csv:age") == f"{tmp_path}/t.csv:age"
    assert resolved_condition("age") == "age"
    assert parse_condition("t.csv:age,stain:category") == ("t.csv", {"age": "", "stain": "category"})
    assert path.is_dir()


@pytest.mark.parametrize("setting", ["age,", ",", "a/b", "age:nosuch", "age,age", "t.csv:", "class"])
def test_a_condition_that_names_no_column_is_refused(setting):
    with pytest.raises(RequestError, match="condition"):
        Data(condition=setting)


def test_arrays_of_an_npz_file_are_columns(tmp_path):
    images = np.zeros((12, 8, 8), np.uint8)
    np.savez(tmp_path / "x.npz", x=images, age=np.arange(12.0), v=np.ones((12, 2)) * np.arange(12)[:, None], few=[1, 2])
    source = open_source(str(tmp_path / "x.npz"))
    columns = with_conditions(source, "age,v").columns
    assert columns["age"].kind == "number"
    assert columns["v"].values.shape == (12, 2)
    with pytest.raises(RequestError, match=r"few.*12 images"):
        with_conditions(source, "few")


def test_the_first_table_that_has_the_columns_is_read(tmp_path):
    images = folder(tmp_path / "x", table_of(NAMES, "file_name,stain", lambda i: "ab"[i % 2]))
    (images / "labels.csv").write_text(table_of(NAMES))
    assert with_conditions(open_source(images), "age").columns["age"].values.tolist() == [*range(12)]
    assert with_conditions(open_source(images), "stain").columns["stain"].kind == "category"
    with pytest.raises(RequestError, match=r"metadata\.csv has no column 'size'"):
        with_conditions(open_source(images), "size")
