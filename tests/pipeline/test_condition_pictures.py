"""Pictures of conditions beside samples: masks in colours, what is made of an image, captions, and their places."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from unfog.config.schema import Config
from unfog.data.settings import Data
from unfog.errors import RequestError
from unfog.pipeline.condition_pictures import condition_captions, condition_pictures, conditions_sheet
from unfog.pipeline.given_images import read_pictures
from unfog.reporting.image_grids import GAP, captioned_groups
from unfog.values.colour_map import category_colours
from unfog.values.condition_format import ColumnFacts
from unfog.values.kinds.image_kinds import picture_text
from unfog.values.kinds.made_conditions import fixed_draws, made_of

SHAPE = (4.0, 6.0)
COLUMNS = (
    ColumnFacts("age", "number", statistics=(5.0, 1.0, 0.0, 9.0)),
    ColumnFacts("degrade", "degrade", statistics=(3.0, *SHAPE, 2.0)),
    ColumnFacts("depth", "image", statistics=(1.0, *SHAPE, 0.0, 2.0)),
    ColumnFacts("grey", "grey", statistics=(1.0, *SHAPE)),
    ColumnFacts("hole", "hole", statistics=(3.0, *SHAPE)),
    ColumnFacts("mask", "mask", ("0", "7", "300"), (1.0, *SHAPE)),
)
CONFIG = Config(columns=COLUMNS, data=Data(size="6x4", channels=3))


def given(count=3):
    random = np.random.default_rng(0)
    stored = random.integers(0, 256, (count, 3, 4, 6), np.uint8)
    x0 = CONFIG.image_format.to_model(torch.from_numpy(stored))
    made = {
        kind: made_of(x0, kind, 2, lambda: fixed_draws(range(count))).numpy() for kind in ("degrade", "grey", "hole")
    }
    labels = random.integers(0, 3, (count, 1, 4, 6)).astype(np.float32)
    depth = random.random((count, 1, 4, 6)).astype(np.float32) * 2
    arrays = {**made, "mask": labels, "depth": depth}
    words = {name: [picture_text(each) for each in values] for name, values in arrays.items()}
    return CONFIG.conditions.parse({"age": [1.0, None, 3.0], **words}), stored, arrays


def test_each_kind_of_image_is_shown_as_what_the_network_gets():
    told, stored, arrays = given()
    shown = condition_pictures(CONFIG, told, range(3))
    assert {name: part.shape for name, part in shown.items()} == dict.fromkeys(arrays, (3, 4, 6, 3))
    colours = np.array(category_colours(COLUMNS[-1].categories), np.uint8)
    assert np.array_equal(shown["mask"], colours[arrays["mask"][:, 0].astype(int)])
    assert np.array_equal(shown["depth"][..., 1], np.round(arrays["depth"][:, 0] / 2 * 255).astype(np.uint8))
    missing = np.isnan(arrays["hole"]).any(1)
    assert 0 < missing.mean() < 1
    assert np.array_equal(shown["hole"][~missing], stored.transpose(0, 2, 3, 1)[~missing])
    assert {*np.unique(shown["hole"][missing]).tolist()} <= {200, 236}  # squares
    luma = stored.astype(float).transpose(0, 2, 3, 1) @ (0.299, 0.587, 0.114)
    assert np.abs(shown["grey"] - luma[..., None]).max() <= 1  # rounding
    # A mean of four pixels of bytes, enlarged: the mean of the picture stays.
    assert np.abs(shown["degrade"].mean((1, 2)) - stored.mean((2, 3))).max() < 16


def test_what_is_not_told_is_checkered():
    hidden = condition_pictures(CONFIG, CONFIG.conditions.parse({}), range(2))
    assert {*np.unique(hidden["mask"]).tolist()} == {200, 236}


def test_a_picture_is_no_condition_of_four_channels():
    facts = ColumnFacts("bands", "image", statistics=(4.0, *SHAPE, 0.0, 0.0, 0.0, 0.0, 9.0, 9.0, 9.0, 9.0))
    config = Config(columns=(facts,), data=Data(size="6x4", channels=3))
    with pytest.raises(RequestError, match=r"bands = picture .* the condition 4; give an array \[H, W, 4\]"):
        read_pictures(config, {"bands": Image.new("RGB", (6, 4))}, 1)


def test_labels_have_different_colours_and_colours_their_own():
    many = category_colours([str(i) for i in range(64)])
    assert len({*many}) == 64
    assert category_colours(["#ff8000", "#000001"]) == [(255, 128, 0), (0, 0, 1)]
    assert len({*category_colours(["#", "#zz", "#12345"])}) == 3  # of a damaged configuration


def test_captions_name_values_and_no_files():
    told, *_ = given()
    assert condition_captions(CONFIG, told, range(4)) == ["age=1", "", "age=3", "age=1"]


def test_samples_stand_between_their_conditions_and_the_truth():
    told, stored, _ = given()
    samples = np.full((3, 4, 6, 3), 90, np.uint8)
    truth = stored.transpose(0, 2, 3, 1)
    sheet = conditions_sheet(CONFIG, told, samples, truth)
    scale = 128 // 6
    cell, names = 6 * scale + GAP, ["degrade", "depth", "grey", "hole", "mask", "drawn", "true"]
    top = 20  # the line of captions
    for i, picture in ((5, samples[0]), (6, truth[0])):
        found = sheet[top : top + 4 * scale : scale, i * cell : i * cell + 6 * scale : scale]
        assert np.array_equal(found, picture), names[i]
    assert sheet.shape[1] == 7 * cell - GAP  # one group across
    few = conditions_sheet(CONFIG, told, samples, truth[:0])
    assert few.shape[1] == 6 * cell - GAP


def test_long_captions_have_four_lines_at_most():
    parts = {"drawn": np.zeros((4, 32, 32, 3), np.uint8)}
    short, long = (captioned_groups(parts, [text, "", "", ""]) for text in ("one", "many words " * 99))
    assert short.shape[1] == long.shape[1] == 2 * 128 + 12
    assert len(long) - len(short) == 3 * 20


def test_a_size_that_conditions_do_not_have_is_drawn_without_them():
    told, *_ = given()
    config = SimpleNamespace(**{name: getattr(CONFIG, name) for name in ("image_format", "columns", "conditions")})
    config.view = CONFIG.view
    larger = conditions_sheet(config, told, np.zeros((1, 8, 8, 3), np.uint8), np.zeros((0, 4, 6, 3), np.uint8))
    assert larger.shape[1] == 128
