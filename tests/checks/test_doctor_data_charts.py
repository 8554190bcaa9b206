"""Bars: as high as their values, each with its name, none if there is nothing to show."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from unfog.reporting.charts import bar_chart, histogram


def heights(chart: str) -> list[float]:
    return [float(rect.get("height", "nan")) for rect in ET.fromstring(chart).iter("rect")]


def titles(chart: str) -> list[str]:
    return [rect.find("title").text for rect in ET.fromstring(chart).iter("rect")]  # type: ignore[union-attr,misc]


def test_bars_are_as_high_as_their_values() -> None:
    chart = bar_chart([10, 0, 5, 2.5], ["cats", "dogs", "<b>", "birds & bees"], "class", "images")
    high = heights(chart)
    assert high[1] == 0
    np.testing.assert_allclose(np.array(high) / high[0], [1, 0, 0.5, 0.25], atol=2e-3)
    assert titles(chart) == ["cats: 10", "dogs: 0", "<b>: 5", "birds & bees: 2.5"]
    assert ">birds &amp; bees<" in chart


def test_labels_that_have_no_room_are_left_out() -> None:
    few, many = (
        bar_chart([1] * 3, ["a", "b", "c"], "x", "y"),
        bar_chart([1] * 200, [f"n{i}" for i in range(200)], "x", "y"),
    )
    assert len(re.findall(r">[abc]</text>", few)) == 3
    assert "rotate(-24" not in few
    assert 20 <= len(re.findall(r">n\d+</text>", many)) <= 40
    assert len(heights(many)) == 200


def test_a_histogram_counts_each_finite_value_once() -> None:
    values = np.random.default_rng(0).normal(size=5000)
    chart = histogram([*values, np.nan, np.inf], "pixels", "images", bins=10)
    counted = [int(title.rsplit(": ", 1)[1].replace(",", "")) for title in titles(chart)]
    assert counted == np.histogram(values, 10)[0].tolist()
    np.testing.assert_allclose(
        np.array(heights(chart)) / max(heights(chart)), np.array(counted) / max(counted), atol=2e-3
    )


@pytest.mark.parametrize("values", [[7], [7, 7, 7], [0.0]])
def test_equal_values_have_a_bar(values: list[float]) -> None:
    assert max(heights(histogram(values, "x", "y"))) > 100


def test_nothing_is_drawn_of_nothing() -> None:
    assert histogram([], "x", "y") == histogram([np.nan], "x", "y") == bar_chart([], [], "x", "y") == ""
    assert max(heights(bar_chart([0, 0], ["a", "b"], "x", "y"))) == 0
