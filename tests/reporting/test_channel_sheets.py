"""Sheets of the channels of a preview: what comes back, also from large ones and from damaged files."""

import base64
import json
import re

import numpy as np
import pytest

from unfog.reporting.channel_sheets import encode_channels, read_channels
from unfog.reporting.image_grids import decode_png, encode_png

PLANES = np.random.default_rng(1).integers(0, 256, (3, 5, 8, 12), np.uint8)
ENDS = [[-1.5, 0, k * 1e6] for k in range(5)]


def tiles_of(sheet):
    pixels = np.asarray(decode_png(base64.b64decode(sheet["picture"].partition(",")[2])))
    h, w, columns = sheet["height"], sheet["width"], sheet["columns"]
    places = [(k // columns * h, k % columns * w) for k in range(sheet["images"] * sheet["channels"])]
    found = np.stack([pixels[y : y + h, x : x + w] for y, x in places])
    return found.reshape(sheet["images"], sheet["channels"], *found.shape[1:])


def test_channels_come_back_to_the_bit_with_their_values(tmp_path):
    (tmp_path / "a.png").write_bytes(encode_channels(PLANES, ENDS, ["cats", "dogs", "<i>"]))
    sheet = read_channels(tmp_path / "a.png", tmp_path)
    assert (tiles_of(sheet) == PLANES).all()
    assert sheet["ends"][2] == ["-1.5", "0", "2e+06"]
    assert sheet["captions"] == ["cats", "dogs", "<i>"]
    assert len(sheet["maps"]["viridis"]) == 16


def test_large_channels_are_made_smaller(tmp_path):
    planes = np.repeat(np.arange(64, dtype=np.uint8)[:, None, None], 512, axis=1)[None].repeat(520, axis=3)
    (tmp_path / "a.png").write_bytes(encode_channels(planes, [[0, 1, 2]] * 64))
    sheet = read_channels(tmp_path / "a.png", tmp_path)
    assert (sheet["height"], sheet["width"]) == (170, 173)  # a third
    assert (tiles_of(sheet) == np.arange(64)[None, :, None, None]).all()


def test_unknown_values_are_transparent_and_no_part_of_means(tmp_path):
    known = np.random.default_rng(2).random(PLANES.shape) < 0.5
    (tmp_path / "a.png").write_bytes(encode_channels(PLANES, ENDS, known=known))
    values, alpha = np.moveaxis(tiles_of(read_channels(tmp_path / "a.png", tmp_path)), -1, 0)
    assert (values == PLANES).all()
    assert (alpha == np.where(known, 255, 0)).all()
    planes = np.full((1, 1, 3 * 1024, 3 * 1024), 7, np.uint8)
    known = np.ones(planes.shape, bool)
    known[..., :1024, :] = False
    known[..., 1024:, ::2] = False
    planes[~known] = 200
    (tmp_path / "a.png").write_bytes(encode_channels(planes, [[0, 1, 2]], known=known))
    values, alpha = np.moveaxis(tiles_of(read_channels(tmp_path / "a.png", tmp_path)), -1, 0)
    assert values.shape == (1, 1, 1536, 1536)
    assert (values[..., 512:, :] == 7).all()
    assert (alpha[..., 0] == np.repeat([0, 255], [512, 1024])).all()


@pytest.mark.parametrize(
    "change",
    [{"images": 2**40}, {"columns": 0}, {"height": 7}, {"channels": 65}, {"ends": []}, {"captions": 3}, {"width": "x"}],
    ids=lambda change: next(iter(change)),
)
def test_a_sheet_that_does_not_fit_its_words_is_none(tmp_path, change):
    whole = decode_png(encode_channels(PLANES, ENDS))
    words = json.loads(whole.text["Channels"]) | change
    (tmp_path / "a.png").write_bytes(encode_png(np.asarray(whole), {"Channels": json.dumps(words)}))
    assert read_channels(tmp_path / "a.png", tmp_path) is None


def test_other_files_are_none_and_nothing_but_pixels_is_passed_on(tmp_path):
    path = tmp_path / "a.png"
    assert read_channels(path, tmp_path) is None
    for content in (b"", b"GIF89a", encode_png(PLANES[0, 0]), encode_channels(PLANES, ENDS)[:-300]):
        path.write_bytes(content)
        assert read_channels(path, tmp_path) is None
    data = encode_channels(PLANES, ENDS)
    path.write_bytes(data[:-12] + b"\0\0\0\x04tEXtK\0hi\x33\x2d\x77\x7b" + data[-12:])
    sheet = read_channels(path, tmp_path)
    assert sheet is None or not re.search(b"hi|Channels", base64.b64decode(sheet["picture"].partition(",")[2]))
    path.rename(tmp_path / "b.png")
    path.symlink_to(tmp_path / "b.png")
    assert read_channels(path, tmp_path) is None
