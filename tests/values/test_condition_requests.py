"""Weights of guidance by name, and grids of conditions: what is read, and what is refused."""

import math

import numpy as np
import pytest

from unfog.config.requests.sample import SamplingRequest
from unfog.config.toml import update
from unfog.errors import RequestError
from unfog.values.columns import Column
from unfog.values.condition_format import ConditionFormat, facts_of
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.condition_requests import ConditionGrid, parse_grid, parse_weights, passes, spell_guidance

FORMAT = ConditionFormat(
    ("cat", "dog"),
    columns=facts_of(
        [
            Column("age", "number", np.array([20.0, 50.0, 80.0])),
            Column("marks", "several", np.array([[1, 0], [1, 1], [0, 0]], np.int8), ("red", "round")),
            Column("place", "vector", np.array([[0.0, 5], [1, 5], [2, 3]])),
            Column("stain", "category", np.array([0, 1, 2]), ("HE", "IHC", "PAS")),
        ]
    ),
)


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        ("age=2,stain=1", (("age", 2), ("stain", 1))),
        ({"age": 2, "stain": np.float32(0.5)}, (("age", 2), ("stain", 0.5))),
        ((("age", -1.0),), (("age", -1),)),
    ],
)
def test_weights_are_read(given, weights):
    assert parse_weights(given) == weights
    assert update(SamplingRequest(), {"guidance": given}, "").guidance == weights


@pytest.mark.parametrize(
    "given",
    [
        "age",
        "=2",
        "age=",
        "age=x",
        "age=1=2",
        "age=2,",
        "age=2,age=2",
        "age=nan",
        "age=1e99",
        {},
        {"age": True},
        {2: 2},
        (),
    ],
)
def test_what_is_no_weight_is_refused(given):
    with pytest.raises(RequestError, match="guidance"):
        parse_weights(given)


def test_a_scale_has_one_usual_form():
    assert FORMAT.guidance(2.0) == 2.0
    assert FORMAT.guidance((("age", 1.0),)) == 1.0
    assert FORMAT.guidance((("stain", 3.0), ("age", 2.0), ("class", 1.0))) == (("age", 2.0), ("stain", 3.0))
    assert FORMAT.guidance(tuple((name, 3.0) for name in ("class", "age", "marks", "place", "stain"))) == 3.0
    assert ConditionFormat(("a", "b")).guidance((("class", 3.0),)) == 3.0
    with pytest.raises(RequestError, match=r"'agee'.*did you mean 'age'"):
        FORMAT.guidance((("agee", 1.0),))
    assert spell_guidance((("age", 2.0), ("stain", 0.5))) == "age=2,stain=0.5"
    assert [passes(scale) for scale in (1.0, 2.0, (("age", 0.0),))] == [1, 2, 1]


def test_a_weight_of_a_condition_that_no_sample_has_is_refused():
    given = FORMAT.parse({"age": [None, 30]})
    FORMAT.check_guided((("age", 2.0), ("stain", 1.0), ("class", 2.0)), given)
    with pytest.raises(RequestError, match=r"stain = 2 has no effect.*--given stain"):
        FORMAT.check_guided((("stain", 2.0),), given)


def shown(grid, **given):
    cells, names = FORMAT.crossed(grid if isinstance(grid, ConditionGrid) else parse_grid(grid), given)
    return FORMAT.names(cells, names.cells)[: names.cells], names


def test_two_conditions_against_each_other_row_by_row():
    cells, names = shown(["age=20..80:3", "stain=all"], marks="red")
    assert names == (
        ("age=20", "age=50", "age=80"),
        ("stain=HE", "stain=IHC", "stain=PAS"),
        ("marks=red",),
    )
    assert cells == [f"age={age} marks=red stain={stain}" for stain in ("HE", "IHC", "PAS") for age in (20, 50, 80)]
    # The class is not told, where it would otherwise change from cell to cell.
    assert not any("class" in cell for cell in cells)
    assert shown({"class": "all", "age": [30.0, 40]})[0][3] == "class=dog age=40"


@pytest.mark.parametrize(
    ("asked", "captions"),
    [
        ("age=20..80", ["20", "30", "40", "50", "60", "70", "80"]),
        ("age=80..20:4", ["80", "60", "40", "20"]),
        ("age=-1..1e0:3", ["-1", "0", "1"]),
        ("age=all", ["20", "30", "40", "50", "60", "70", "80"]),
        ("age=20,25", ["20", "25"]),
        ("stain=PAS,HE", ["PAS", "HE"]),
        ("marks=all", ["red", "round"]),
        ("marks=;,red;round", [";", "red;round"]),
        ("place=0;1,2;3", ["0;1", "2;3"]),
        ("class=all", ["cat", "dog"]),
    ],
)
def test_the_values_of_one_condition(asked, captions):
    name = asked.partition("=")[0]
    assert shown([asked])[1].across == tuple(f"{name}={caption}" for caption in captions)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["agee=1..2"], "did you mean 'age'"),
        (["age"], "NAME=LOW..HIGH"),
        (["age=1..2", "age=3"], "comes twice"),
        (["age=1..2", "stain=all", "marks=all"], "room for one or two"),
        (["age=20..20"], "two ends"),
        (["age=1..2:1"], "2 to 1,000"),
        (["age=1..2:99999"], "not a number"),
        (["age=1..x"], "'x' is not a number"),
        (["age=20,20"], "has 20 twice"),
        (["age=1..2:40", "place=0;0,1;1,2;2"], ""),
        (["age=1..2:500", "stain=all"], "over 1,000 cells"),
        (["place=all"], "needs categories or numbers"),
        (["place=0;1..2;3"], "only a number has one"),
        (["stain=HE..PAS"], "not a value of this column"),
        ({"age": []}, "has no value"),
        ({}, "one or two"),
    ],
)
def test_what_is_no_grid_is_refused(asked, said):
    if not said:
        assert shown(asked)[1].cells == 120
        return
    with pytest.raises(RequestError, match=said):
        shown(asked)


def test_the_range_of_the_training_images_is_not_outside_of_them():
    for high in (89.9, 0.1, 1 / 3, 7.7):
        format = ConditionFormat(columns=(ColumnFacts("age", "number", statistics=(0.0, 1.0, -0.3, high)),))
        cells, _ = format.crossed(parse_grid(["age=all"]), {})
        assert not format.concerns(cells)


def test_captions_may_have_commas_and_any_word():
    facts = ColumnFacts("text", "text", (), (256.0, 24.0))  # bytes alone
    captions = ConditionFormat(columns=(facts,))
    _, names = captions.crossed(parse_grid(["text=a red, round heart; all"]), {})
    assert names.across == ("text=a red, round heart", "text=all")


def test_conditions_outside_of_the_grid_have_one_value():
    with pytest.raises(RequestError, match="'age' has 2 values"):
        shown(["stain=all"], age=[20, 30])
    with pytest.raises(RequestError, match="both have 'stain'"):
        shown(["stain=all"], stain="HE")


def test_a_value_that_is_missing_is_not_told():
    given = dict(FORMAT.parse({"age": [30, None, math.nan], "class": None, "marks": [None, "red"]}))
    assert [value == value for value in given["age"]] == [True, False, False]
    assert given["class"] == (-1,)
    assert given["marks"] == ((-1, -1), (1, 0))
    assert FORMAT.names(tuple(given.items()), 2)[1] == "marks=red"
    # As --label none does not ask for a class by the name "None".
    assert dict(FORMAT.parse(FORMAT.with_label({}, None)))["class"] == (0, 1)


def test_many_values_outside_of_the_images_are_said_in_a_few_lines():
    lines = FORMAT.concerns(FORMAT.parse({"age": list(range(100, 200))}))
    assert len(lines) == 4
    assert "97 more values" in lines[-1]


def test_the_number_of_samples_is_that_of_the_cells():
    assert SamplingRequest().count(None, "") == 16
    assert SamplingRequest().count(3, "the rows are") == 3
    with pytest.raises(RequestError, match="n = 4, and the rows are 3; omit n"):
        SamplingRequest(n=4).count(3, "the rows are")
    with pytest.raises(RequestError, match="grid and to_seed"):
        SamplingRequest(grid=parse_grid(["age=1..2"]), to_seed=3)
    assert SamplingRequest(grid="karras").cells is None
    assert SamplingRequest(grid=parse_grid(["age=1..2"])).noise_grid is None
