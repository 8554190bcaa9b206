"""Findings of the doctor on conditions: images of each value, correlated columns, values that name images."""

import numpy as np
import pytest

from unfog.checks.images.condition_checks import Comparable, association, check_conditions
from unfog.data.dataset import ImageSet
from unfog.values.columns import Column

N, HELD = 400, 100
DRAW = np.random.default_rng(0)
AGE = DRAW.uniform(20, 80, N + HELD)


def number(name, values):
    return Column(name, "number", np.asarray(values, np.float64))


def category(name, codes, names=None):
    codes = np.asarray(codes, np.int64)
    return Column(name, "category", codes, tuple(names or map(str, range(codes.max() + 1))))


def findings(*columns):
    """Return the findings by code on a set of N + HELD images with these columns."""

    def images(rows):
        count = len(range(N + HELD)[rows])
        some = {column.name: column.rows(rows) for column in columns}
        return ImageSet(np.zeros((count, 1, 2, 2), np.uint8), [str(i) for i in range(count)], some)

    found = check_conditions(images(slice(N)), images(slice(N, None)))
    return {finding.code.removeprefix("data.condition_"): finding for finding in found}


def test_conditions_that_are_well_covered_are_fine():
    found = findings(number("age", AGE), category("stain", DRAW.integers(0, 3, N + HELD)))
    assert {finding.severity for finding in found.values()} == {"fine"}
    assert findings() == {}


def test_rare_categories_gaps_and_unknown_values_are_said():
    rare = np.where(np.arange(N + HELD) < 12, 1, 0)
    gap = np.where((AGE > 40) & (AGE < 70), 30.0, AGE)
    unknown = np.where(np.arange(N + HELD) % 3 > 0, np.nan, AGE)
    found = findings(category("stain", rare, ["HE", "PAS"]), number("age", gap), number("mass", unknown))["coverage"]
    assert found.severity == "warning"
    assert "stain = PAS has 12 images" in found.evidence
    assert "no image has age between 39" in found.evidence
    assert "mass is not known for 266 of 400" in found.evidence
    several = Column("marks", "several", np.stack([rare, 1 - rare], 1).astype(np.int8), ("red", "round"))
    assert "marks = red has 12 images" in findings(several)["coverage"].evidence
    steps = number("dose", DRAW.choice([1.0, 2, 4, 8], N + HELD))
    assert findings(steps)["coverage"].severity == "fine", "few values are no gaps"


@pytest.mark.parametrize(
    "other",
    [
        number("other", 2 * AGE + DRAW.normal(0, 10, N + HELD)),
        category("other", np.digitize(AGE, np.linspace(25, 75, 6))),
    ],
    ids=["number", "category"],
)
def test_correlated_columns_are_said(other):
    found = findings(number("age", AGE), other)["pairs"]
    assert found.severity == "hint"
    assert "age and other (0.9" in found.evidence


def test_a_column_that_repeats_the_class_is_said():
    labels = np.arange(N + HELD) % 4
    label = Column("class", "class", labels, tuple("abcd"))
    found = findings(label, category("organ", labels % 2), number("age", AGE))["classes"]
    assert found.severity == "hint"
    assert found.facts == {"columns": ["organ"]}
    assert findings(label, number("age", AGE))["classes"].severity == "fine"


def test_subjects_that_are_in_training_and_held_out_are_said():
    subject = DRAW.permutation(np.arange(N + HELD) // 5)
    for column in (category("patient", subject), number("patient", subject)):
        found = findings(column)["groups"]
        assert found.severity == "hint"
        assert found.facts["shared"] > 80
    apart = np.concatenate([np.arange(N) // 5, 1000 + np.arange(HELD) // 5])
    assert "groups" not in findings(number("patient", apart))
    assert "groups" not in findings(number("age", AGE)), "values of one image each"


def test_measures_of_association_are_those_of_their_definition():
    numbers = Comparable(AGE, False)
    codes = Comparable(DRAW.integers(0, 5, N + HELD).astype(np.float64), True)
    assert association(numbers, numbers) == pytest.approx(1)
    assert association(codes, codes) == pytest.approx(1, abs=1e-6)
    assert association(numbers, codes) < 0.15
    assert association(codes, Comparable(DRAW.integers(0, 100, N + HELD).astype(np.float64), True)) < 0.15
    # Of 200 groups of 2 or 3 images, the ratio without adjustment would be 0.6.
    assert association(Comparable(DRAW.integers(0, 200, N + HELD).astype(np.float64), True), numbers) < 0.3
    hidden = Comparable(np.where(np.arange(N + HELD) < 10, AGE, np.nan), False)
    assert association(hidden, numbers) == 0, "too few images"


def test_images_as_conditions_are_checked_by_their_labels_and_those_made_of_the_image_are_not():
    labels = np.zeros((N + HELD, 1, 2, 2), np.int8)
    labels[:12, 0, 0, 0], labels[12:20] = 1, -1
    found = findings(Column("mask", "mask", labels, ("sky", "tree")))["coverage"]
    assert found.facts["rare"] == ["mask = tree has 12 images"]

    class Made:  # as `MadeValues`, an array of images alone
        def __len__(self):
            return N

    assert (
        check_conditions(
            ImageSet(np.zeros((1, 1, 2, 2), np.uint8), ["0"], {"grey": Column("grey", "grey", Made())}),
            ImageSet(np.zeros((0, 1, 2, 2), np.uint8), [], {}),
        )
        == []
    )


def test_images_that_held_out_images_share_with_training_images_are_said():
    rng = np.random.default_rng(1)
    masks = rng.integers(0, 2, (N + HELD, 1, 4, 8), np.int8)
    own = findings(Column("mask", "mask", masks, ("a", "b")))
    assert own["images"].severity == "fine"
    assert own["images"].facts["shared"] < 5
    frames = masks[np.arange(N + HELD) % 10]  # ten masks for all
    frames[-1] = -1  # not known
    found = findings(Column("mask", "mask", frames, ("a", "b")))["images"]
    assert found.severity == "hint"
    assert "99 of 99 (100%) held-out images have the mask of a training image" in found.evidence
    assert found.facts["different"] == 10
    assert "images" not in findings(number("age", AGE))
