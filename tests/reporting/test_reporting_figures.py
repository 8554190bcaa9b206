"""Grids, strips and charts: geometry, pixels, ticks and gaps."""

import io
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from unfog.reporting.charts import _POINTS, _Axis, line_chart  # axes of any range
from unfog.reporting.findings import Finding, write_findings
from unfog.reporting.image_grids import (
    GAP,
    encode_png,
    grid,
    grid_of_pairs,
    labelled_strip,
    png_data_uri,
    printable_name,
    save_png,
    with_column_captions,
)

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 200, (7, 10, 12, 3), np.uint8)


def test_images_stand_over_their_counterparts_also_in_a_row_that_is_not_full():
    """Eleven pairs: the eleventh reconstruction stood in another row than its image."""
    images = np.arange(1, 12, dtype=np.uint8)[:, None, None].repeat(3, 1).repeat(5, 2)
    cells = grid_of_pairs(images, 100 + images, columns=8)[:: GAP + 3 * 25, :: GAP + 5 * 25, 0]
    assert cells.shape == (4, 8)
    assert (cells[0] == np.arange(1, 9)).all()
    assert cells[2].tolist() == [9, 10, 11, *[255] * 5]
    assert (cells[1::2] == np.where(cells[::2] < 255, cells[::2].astype(int) + 100, 255)).all()
    assert grid_of_pairs(images[:2], images[:2], columns=8).shape[1] < 3 * 5 * 25


def test_grid_places_every_pixel(images):
    sheet = grid(images, columns=3, scale=2, gap=4)
    assert sheet.shape == (3 * 20 + 2 * 4, 3 * 24 + 2 * 4, 3)
    paper = np.ones(sheet.shape[:2], bool)
    for i, image in enumerate(images):
        y, x = (i // 3) * 24, (i % 3) * 28
        cell = sheet[y : y + 20, x : x + 24]
        for corner in (cell[::2, ::2], cell[1::2, ::2], cell[::2, 1::2], cell[1::2, 1::2]):
            np.testing.assert_array_equal(corner, image)
        paper[y : y + 20, x : x + 24] = False
    assert (sheet[paper] == 255).all()


def test_grid_is_near_square_and_enlarges_small_pictures(images):
    assert grid(images[:, :10, :10], gap=0).shape == (3 * 120, 3 * 120, 3)
    assert grid(np.zeros((16, 64, 64), np.uint8), gap=0).shape == (4 * 128, 4 * 128, 3)
    assert grid(np.zeros((2, 300, 200, 1), np.uint8), gap=0).shape == (300, 400, 3)


@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 8, 8, 1)])
def test_grey_becomes_rgb(shape):
    grey = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    sheet = grid(grey, columns=2, scale=1, gap=0)
    for channel in range(3):
        np.testing.assert_array_equal(sheet[:, :8, channel], grey[0].reshape(8, 8))


def test_labels_begin_rows_and_are_written(images):
    labels = ["cat", "dog", "cat", "cat", "dog", "bird", "cat"]
    sheet = grid(images, columns=3, scale=1, gap=2, row_names=labels)
    left = sheet.shape[1] - (3 * 12 + 2 * 2)
    assert sheet.shape[0] == 4 * 12 - 2  # cat twice, dog, bird
    for row, column, index in [(0, 0, 0), (0, 1, 2), (0, 2, 3), (1, 0, 6), (2, 1, 4), (3, 0, 5)]:
        y, x = row * 12, left + column * 14
        np.testing.assert_array_equal(sheet[y : y + 10, x : x + 12], images[index])
    written = [(sheet[row * 12 : row * 12 + 10, :left] < 200).any() for row in range(4)]
    assert written == [True, False, True, True]


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("Ärger, café", "Arger, cafe"),
        ("cafe\u0301", "cafe"),
        ("Größe", "class 3"),
        ("кошка", "class 3"),
        ("犬", "class 3"),
    ],
)
def test_a_name_that_the_font_lacks_is_no_row_of_boxes(name, written):
    assert printable_name(name, "class 3") == written


def test_strip_lines_levels_up_under_their_captions(images):
    sheet = labelled_strip(
        {"x_t": images[:3], "predicted x0": images[3:6]}, ["t = 999", "t = 500", "t = 0"], scale=4, gap=2
    )
    left, top = sheet.shape[1] - (3 * 48 + 2 * 2), sheet.shape[0] - (2 * 40 + 2)
    assert top > 10
    assert left > 20
    for row in range(2):
        for column in range(3):
            y, x = top + row * 42, left + column * 50
            np.testing.assert_array_equal(sheet[y : y + 40 : 4, x : x + 48 : 4], images[3 * row + column])
            assert (sheet[:top, x : x + 48] < 200).any()  # its caption
    with pytest.raises(ValueError, match="captions"):
        labelled_strip({"x_t": images[:3]}, ["one"])


def test_captions_of_columns_that_are_too_wide_are_in_lines(images):
    short, cut = (with_column_captions(grid(images[:2], 2, 4), names, 48) for names in (["a", "b"], ["mask=0", "b"]))
    assert short.shape == cut.shape
    long = with_column_captions(grid(images[:2], 2, 4), ["mask=00000000 temp=2", "b"], 48)
    above = long.shape[0] - short.shape[0]
    assert above == short.shape[0] - grid(images[:2], 2, 4).shape[0]  # one line more
    assert np.array_equal(long[above:, 52:], short[:, 52:])  # a short caption is next to its images
    alone = with_column_captions(grid(images[:2], 2, 4), ["temp=2", "b"], 48)
    assert np.array_equal(long[above:, :48], alone[:, :48])


@pytest.mark.parametrize("bad", [np.zeros((2, 4, 4, 3), np.float32), np.zeros((0, 4, 4, 3), np.uint8)])
def test_what_is_no_picture_is_refused(bad):
    with pytest.raises(ValueError, match="uint8"):
        grid(bad)
    with pytest.raises(ValueError, match="1 or 3"):
        grid(np.zeros((2, 4, 4, 4), np.uint8))


def test_png_files_are_whole_and_exact(tmp_path, images):
    path = tmp_path / "samples" / "00000010.png"
    save_png(path, tmp_path, images[0])
    assert [p.name for p in path.parent.iterdir()] == ["00000010.png"]
    np.testing.assert_array_equal(np.asarray(Image.open(path)), images[0])
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(encode_png(images[0][..., :1])))), images[0][..., 0])


def test_data_uri_shrinks_only_what_is_too_wide(tmp_path):
    save_png(tmp_path / "a.png", tmp_path, np.zeros((50, 100, 3), np.uint8))
    assert png_data_uri(tmp_path / "a.png", tmp_path, 100)[1] == 100
    assert png_data_uri(tmp_path / "a.png", tmp_path, 40)[1] == 40
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    assert png_data_uri(tmp_path / "b.png", tmp_path, 100) is None


def chart(series, **options):
    svg = line_chart(series, "step", "loss", **options)
    assert not re.search(r"\b(nan|inf)\b", svg)
    return ET.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def paths(svg):
    return [p.get("d") for p in svg.iter(f"{SVG}path") if p.get("fill") == "none"]


def test_chart_points_lie_where_their_values_say():
    svg = chart({"loss": ([0, 50, 100], [0.0, 1.0, 2.0])})
    points = np.array([[float(n) for n in p.split()] for p in re.split("[ML]", paths(svg)[0])[1:]])
    assert points[0, 0] < points[1, 0] < points[2, 0]
    np.testing.assert_allclose(points[1], (points[0] + points[2]) / 2, atol=0.1)
    assert points[0, 1] > points[2, 1]  # larger is higher
    texts = {t.text for t in svg.iter(f"{SVG}text")}
    assert {"0", "0.5", "1", "1.5", "2", "step", "loss", "100"} <= texts
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == "loss over step"


def test_log_axis_is_even_in_decades_and_drops_what_it_cannot_show():
    svg = chart({"loss": ([0, 1, 2, 3, 4], [1000, 10, 0.1, -1, 0])}, log_y=True)
    (path,) = paths(svg)
    ys = [float(p.split()[1]) for p in re.split("[ML]", path)[1:]]
    assert len(ys) == 3
    assert ys[1] - ys[0] == pytest.approx(ys[2] - ys[1], abs=0.11)
    assert {"0.1", "1", "10", "100", "1,000"} <= {t.text for t in svg.iter(f"{SVG}text")}


def test_gaps_break_the_line():
    y = [1, 2, math.nan, 3, math.inf, 4, 5]
    (path,) = paths(chart({"loss": (range(7), y)}))
    assert re.sub(r"[\d. ]", "", path) == "MLMML"


@pytest.mark.parametrize("series", [{}, {"a": ([], [])}, {"a": ([1, 2], [math.nan, math.inf])}])
def test_nothing_to_show_is_an_empty_chart(series):
    assert line_chart(series, "x", "y") == ""


@pytest.mark.parametrize("value", [0.0, 5.0, -3e-9, 1e12])
def test_one_point_is_a_dot(value):
    svg = chart({"a": ([3], [value])})
    assert len(list(svg.iter(f"{SVG}circle"))) == 1


def test_long_lines_are_thinned_and_keep_their_spikes():
    y = np.sin(np.arange(100_000) / 5000)
    y[34_567], y[77_777] = 9.0, -9.0
    (path,) = paths(chart({"a": (np.arange(100_000), y)}))
    heights = [float(p.split()[1]) for p in re.split("[ML]", path)[1:]]
    assert _POINTS / 2 < len(heights) <= _POINTS
    assert max(heights) - min(heights) == pytest.approx((290 - 46 - 14) * 18 / (18 * 1.12), abs=0.3)


def test_texts_are_escaped():
    svg = line_chart({"<script>": ([1, 2], [1, 2]), "b": ([1], [1])}, "<x>", 'y"', title='"><script>')
    assert "<script>" not in svg
    ET.fromstring(svg)


@pytest.mark.parametrize("log", [False, True])
def test_ticks_are_few_round_and_within(log):
    rng = np.random.default_rng(0)
    for low in 10 ** rng.uniform(-9, 9, 200):
        high = low * 10 ** rng.uniform(0.02, 9)
        ticks = _Axis(low, high, 0, 1, log).ticks()
        assert 2 <= len(ticks) <= 9
        assert all(low * (1 - 1e-9) <= tick <= high * (1 + 1e-9) for tick in ticks)
        assert all(float(f"{tick:.4g}") == pytest.approx(tick, rel=1e-9) or high / low < 2 for tick in ticks)


def test_findings_are_shown_as_text(tmp_path):
    finding = Finding("data.names", "warning", "<script>alert(1)</script>", "rename <b>")
    page = write_findings(tmp_path, "<i>run</i>", [finding]).read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "rename &lt;b&gt;" in page
    assert "<script" not in page
    assert "<i>" not in page
