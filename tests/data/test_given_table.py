"""A table of conditions to draw: each row a sample, and what is refused."""

import json

import numpy as np
import pytest

from unfog.data.columns.given_table import GIVEN_TABLE, read_given_table, save_given_table
from unfog.errors import RequestError
from unfog.values.columns import Column
from unfog.values.condition_format import ConditionFormat, facts_of

FORMAT = ConditionFormat(
    ("cat", "dog"),
    columns=facts_of(
        [
            Column("age", "number", np.array([20.0, 50.0, 80.0])),
            Column("marks", "several", np.array([[1, 0], [1, 1], [0, 0]], np.int8), ("red", "round")),
            Column("place", "vector", np.array([[0.0, 5], [1, 5], [2, 3]])),
            Column("level", "category", np.array([0, 1, 2]), ("1", "2", "3")),
        ]
    ),
)


def names(path):
    """The conditions of all samples of a table, as files are named."""
    table = read_given_table(path, FORMAT)
    given = FORMAT.parse({"class": None, **table.given})
    return FORMAT.names(given, table.rows)[: table.rows]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", "semicolons"])
def test_a_sample_for_each_row_and_an_empty_cell_is_not_told(tmp_path, suffix):
    rows = [
        {"age": "30", "marks": "red;round", "place": "0;1", "level": "02", "label": "dog"},
        {"age": "", "marks": ";", "place": "NA", "level": "", "label": "cat"},
        {"age": "1e1", "marks": "", "place": "1;2", "level": "3", "label": ""},
    ]
    path = tmp_path / f"rows{suffix if suffix.startswith('.') else '.csv'}"
    if suffix == ".jsonl":
        values = {
            "30": 30,
            "1e1": 10.0,
            "red;round": ["red", "round"],
            "0;1": [0, 1],
            "": None,
            "02": 2,
            ";": [],
            "3": 3.0,
        }
        text = "".join(json.dumps({name: values.get(cell, cell) for name, cell in row.items()}) + "\n" for row in rows)
    else:
        separator = {".csv": ",", ".tsv": "\t"}.get(suffix, ";")
        quote = '"' if separator == ";" else ""
        lines = [list(rows[0]), *(row.values() for row in rows)]
        text = "\n".join(separator.join(f"{quote}{cell}{quote}" for cell in line) for line in lines)
    path.write_text(text)
    assert names(path) == [
        "class=dog age=30 level=2 marks=red;round place=0;1",
        "class=cat marks=;",
        "age=10 level=3 place=1;2",
    ]


def test_files_are_named_after_a_column_and_other_columns_are_named(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("weight,file_name,age,id\n1,a/anna.v2.png,30,7\n2,..\\bert,40,8\n3,,50,9\n,,,\n")
    table = read_given_table(path, FORMAT)
    assert table.files == ["anna.v2", "bert", ""]
    assert table.unused == ["weight", "id"]
    assert table.given == {"age": ["30", "40", "50"]}
    assert table.rows == 3, "rows without any cell are those that spreadsheets leave at the end"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("agee\n3\n", "column 'agee'; did you mean 'age'"),
        ("weight\n3\n", "no column of a condition, only weight; .*class, age"),
        ("age,age\n3,4\n", "2 columns called age"),
        ("age\n", "no rows"),
        ("", "no rows"),
        ("age\n3\nx\n", "row 2: age = 'x' is not a number"),
        ("level,age\n3,1\n7,2\n", "row 2: level = '7' is not a value"),
        ("class\ncat\nbird\n", "row 2: class = 'bird'"),
        ("place,age\n1;2;3,5\n", "row 1: place = 1;2;3 has 3 numbers"),
        ("age,level\n1,2,3\n", "3 fields in line 2"),
        ("age\n\xff\n", "UTF-8"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, text, said):
    path = tmp_path / "rows.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RequestError, match=said):
        read_given_table(path, FORMAT)


def test_a_table_that_is_nowhere_is_refused(tmp_path):
    for path in (tmp_path / "rows.csv", tmp_path):
        with pytest.raises(RequestError, match=r"given_table = .* is not a file"):
            read_given_table(path, FORMAT)
    (tmp_path / "rows.csv").write_text("age\n3\n")
    with pytest.raises(RequestError, match="no conditions"):
        read_given_table(tmp_path / "rows.csv", ConditionFormat())


def test_the_table_of_samples_has_all_that_they_are_told(tmp_path):
    told = {"age": [1 / 3, None], "marks": ["red;round", ";", None], "place": [[0.1, 1e-9]], "level": ["3"]}
    given = FORMAT.parse({"class": ["dog"], **told})
    save_given_table(tmp_path, FORMAT, given, [f"{i:06d}.npy" for i in range(6)])
    table = read_given_table(tmp_path / GIVEN_TABLE, FORMAT)
    assert table.files == [f"{i:06d}" for i in range(6)]
    again = FORMAT.columns_of(FORMAT.parse(table.given), range(6))
    for name, column in FORMAT.columns_of(given, range(6)).items():
        np.testing.assert_array_equal(again[name].values, column.values)
    save_given_table(tmp_path / "none", FORMAT, FORMAT.parse({"class": None}), ["000000.npy"])
    assert not (tmp_path / "none").exists()
