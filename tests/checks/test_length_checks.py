"""How long to train: the tables, and what the length of a run comes to."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from unfog.checks.settings.length_checks import (  # numbers of all sizes, few of which a run has
    COMMON_LENGTHS,
    MILESTONES,
    PUBLISHED_RUNS,
    _milestones,
    check_length,
    format_count,
    training_length_guide,
)
from unfog.config.presets import preset
from unfog.config.schema import Init
from unfog.data.settings import Data


def case(images, pictures=8_000, side=64, batch=64):
    base = preset("default")
    config = replace(
        base,
        data=Data(size=side, channels=3),
        training=replace(base.training, images=images, batch=batch, budget=""),
    )
    return config, SimpleNamespace(train=range(pictures))  # of which only the length counts


def test_the_guide_counts_steps_epochs_and_hours_for_this_data_and_pace():
    found = training_length_guide(*case(12_800_000), seconds_per_step=0.64)
    assert found.severity == "fine"
    rows = {row[0]: row[1:] for row in found.figures[0].table}
    assert rows["this run"] == ["12.8 million", "200,000", "1,600", "1 d 11 h"]
    assert rows["recognisable"] == ["50,000 to 2 million", "781 to 31,250", "6.2 to 250", "8 min 20 s to 5 h 33 min"]
    assert "12.8 million in 1 d 11 h, where samples become good" in found.evidence


@pytest.mark.parametrize(("images", "said"), [(64, "1 step trains on 64 images"), (128, "2 steps train on 128 images")])
def test_a_length_of_one_step_is_said_in_the_singular(images, said):
    assert check_length(*case(images)).evidence.startswith(f"{said}, each of the 8,000 about ")


def test_hours_are_left_out_where_the_pace_is_not_known():
    found = training_length_guide(*case(12_800_000))
    assert found.figures[0].table[-1][-1] == "not measured"
    assert {row[-1] for row in found.figures[2].table[1:]} == {"not measured"}


def test_the_usual_table_is_computed_for_this_pace():
    rows = {
        (row[0], row[1]): row for row in training_length_guide(*case(10**6), seconds_per_step=0.64).figures[2].table[1:]
    }
    assert len(rows) == len(COMMON_LENGTHS)
    assert rows["10,000 images", "64"][2:] == [
        "200,000", "12.8 million", "1,280", "1 day on a V100", "1 d 11 h"
    ]  # fmt: skip
    assert rows["50,000 images", "256"][-1] == "59 d 06 h"  # 32 million images of 16 times the pixels, 0.01 s each
    assert rows["CIFAR-10", "32"][-1] == "22 h 13 min"


@pytest.mark.parametrize(
    ("images", "place"),
    [
        (10_000, "too few for recognisable samples"),
        (500_000, "become recognisable"),
        (5_000_000, "beyond where they become recognisable"),
        (30_000_000, "become good"),
        (10**9, "become saturated"),
        (10**10, "beyond where they become saturated"),
    ],
)
def test_a_length_is_placed(images, place):
    assert training_length_guide(*case(images, 10**7)).evidence.endswith(place)


def test_small_sets_are_learned_by_heart_before_they_saturate():
    table = {row[0]: row for row in training_length_guide(*case(10**5, pictures=500)).figures[0].table}
    assert "memorized" in table["saturated"][3]
    assert "memorized" not in table["recognisable"][3]


def test_milestones_follow_one_another_and_the_side():
    for side in (28, 64, 256):
        lows, highs = zip(*_milestones(side).values())
        assert list(lows) == sorted(lows)
        assert list(highs) == sorted(highs)
        assert all(low <= high for low, high in zip(lows, highs))
    assert _milestones(28) != _milestones(64) != _milestones(256)


def test_ranges_hold_what_is_known():
    """Each published run that says how good it was lies in the range of its level, or beyond a narrow set's."""
    for known in PUBLISHED_RUNS:
        level = (
            "recognisable" if "recognisable" in known.level else "saturated" if known.level.startswith("FID") else ""
        )
        if level:
            low, high = _milestones(known.side)[level]
            assert low / 4 <= known.images <= high, known
    assert set(MILESTONES) == {"recognisable", "good", "saturated"}


@pytest.mark.parametrize(
    ("images", "pictures", "severity"),
    [
        (20_000, 10_000, "warning"),
        (60_000, 10_000, "fine"),
        (10**6, 400, "warning"),
        (700_000, 400, "fine"),
        (10**8, 40_000, "hint"),
        (10**6, 10**7, "hint"),
    ],
)
def test_a_length_is_judged_by_need_and_by_supply(images, pictures, severity):
    found = check_length(*case(images, pictures))
    assert found.severity == severity
    if severity == "warning":
        assert found.remedy.removeprefix("train on ").startswith("--images")


def test_a_set_that_is_too_small_is_not_told_to_train_until_it_is_learned_by_heart():
    for images in (5_000, 20_000, 60_000):
        found = check_length(*case(images, pictures=6))
        assert found.severity == "warning"
        assert "so few are memorized" in found.evidence
        assert "--images" not in found.remedy
    for pictures in (25, 40, 200):  # what is advised is nothing that is warned of
        advised = int(check_length(*case(5_000, pictures)).remedy.split("--images ")[1].split()[0])
        assert check_length(*case(advised, pictures)).severity == "fine"


def test_weights_that_are_trained_already_have_something_recognisable():
    config, prepared = case(10_000, pictures=20)
    assert check_length(config, prepared).severity == "warning"
    tuned = replace(config, init=Init("runs/flowers"))
    assert check_length(tuned, prepared).severity == "fine"
    assert "recognised" not in training_length_guide(tuned, prepared).evidence
    long = replace(tuned, training=replace(tuned.training, images=100_000))
    assert check_length(long, prepared).severity == "warning", "they learn memorized all the same"


def test_the_default_hour_of_a_slow_cpu_is_no_fault():
    assert check_length(*case(200_000, 500)).severity == "fine"


def test_numbers_as_people_say_them():
    assert [format_count(v) for v in (0.2, 7, 50_000, 1.5e6, 2.5e9)] == [
        "0.2",
        "7",
        "50,000",
        "1.5 million",
        "2.5 billion",
    ]
