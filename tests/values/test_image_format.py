"""The format of images: shapes, sizes, stored values and views, and that no other module knows of them."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

import unfog
from package_source import trees
from unfog.config.schema import Config
from unfog.config.spec_strings import FormatError, parse_value
from unfog.config.toml import from_toml, to_toml
from unfog.data.settings import Data
from unfog.errors import RequestError
from unfog.values.image_format import (
    BYTES,
    ImageFormat,
    Size,
    StoredValues,
    channel_names,
    check_sides,
    describe_channels,
    luma_weights,
    parse_size,
    scaled,
    sides_of,
    size_of,
    to_pillow,
    to_rgb,
)

ROOT = Path(unfog.__file__).parent
WIDE = ImageFormat(3, 64, 96)


def test_a_format_knows_its_shape_bytes_and_text():
    assert WIDE.shape == (3, 64, 96)
    assert (WIDE.count, WIDE.nbytes, WIDE.pixels) == (3 * 64 * 96, 3 * 64 * 96, 64 * 96)
    assert (str(WIDE), str(ImageFormat(1, 64, 64))) == ("96x64 RGB", "64x64 grey")
    assert (WIDE.size, ImageFormat(1, 64, 64).size) == ("96x64", 64)
    assert ImageFormat.of(3, "96x64") == WIDE
    assert WIDE.empty().shape == (0, 64, 96, 3)
    assert WIDE.empty_stored(2).shape == (2, 3, 64, 96)
    assert WIDE.empty(2).dtype == WIDE.empty_stored(2).dtype == np.uint8
    assert WIDE.as_mask == ImageFormat(1, 64, 96)
    assert (WIDE.square_side, ImageFormat(1, 28, 28).square_side) == (78, 28)


def test_every_level_comes_back_to_the_bit():
    stored = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    x0 = BYTES.to_model(stored)
    assert x0.dtype == torch.float32
    assert torch.equal(x0, stored / 127.5 - 1)
    assert np.allclose(x0.flatten().numpy(), BYTES.levels(), atol=1e-7)
    assert torch.equal(BYTES.to_stored(x0), stored)
    assert BYTES.to_stored(torch.tensor([-7.0, 7.0])).tolist() == [0, 255]  # a sampler may overshoot
    x = torch.tensor([-1.0, 0.25, 1.0])
    assert torch.equal(eval(BYTES.formula("x")), (x + 1) * 127.5)


def test_stored_values_are_seen_as_bytes():
    stored = np.arange(256, dtype=np.uint8)
    assert StoredValues().to_bytes(stored) is stored
    deep = StoredValues("uint16", 0, 65535)
    assert np.array_equal(deep.to_bytes(stored.astype(np.uint16) * 257), stored)
    assert StoredValues("float32", -1, 3).to_bytes(np.float32([-2, -1, 1, 3, 9])).tolist() == [0, 0, 128, 255, 255]


def test_a_view_is_rgb_whatever_the_channels_are():
    grey = torch.linspace(-1, 1, 6).view(1, 1, 2, 3)
    view = ImageFormat(1, 2, 3).to_view(grey)
    assert view.shape == (1, 2, 3, 3)
    assert (view == view[..., :1]).all()
    colours = torch.rand(2, 3, 4, 6) * 2 - 1
    format = ImageFormat(3, 4, 6)
    assert np.array_equal(format.to_view(colours), format.to_pictures(colours))
    assert np.array_equal(format.to_pictures(colours), format.to_stored(colours).permute(0, 2, 3, 1).numpy())
    with pytest.raises(ValueError, match="1 or 3"):
        to_rgb(np.zeros((1, 2, 2, 2), np.uint8))
    for channels, mode in ((1, "L"), (3, "RGB"), (4, "RGBA")):
        image = to_pillow(np.zeros((2, 5, channels), np.uint8))
        assert (image.mode, image.size) == (mode, (5, 2))


def test_channels_have_names():
    assert (describe_channels(1), describe_channels(3), describe_channels(5)) == ("grey", "RGB", "5 channels")
    assert (channel_names(1), channel_names(3)) == (("grey",), ("red", "green", "blue"))
    assert len(set(channel_names(5))) == 5
    assert [sum(luma_weights(count)) for count in (1, 3, 5)] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (64, 64),
        ("64", 64),
        ("96x64", "96x64"),
        ("64x96", "64x96"),
        ("64x64", 64),
        (0, 0),
        (" 96X64", "96x64"),
        (np.int64(64), 64),
    ],
)
def test_a_size_has_one_form(given, size):
    assert parse_size(given) == size
    assert type(parse_size(given)) is type(size)
    assert Data(size=given).size == size
    assert parse_value(Size, [str(given)]) == size
    assert size_of(*sides_of(size)) == size


def test_a_size_is_width_times_height_and_a_format_height_first():
    assert sides_of("96x64") == (64, 96)
    assert Data(size="96x64", channels=1).image_format.shape == (1, 64, 96)
    assert Config(data=Data(size="96x64", channels=1)).input_shape == (1, 64, 96)
    assert (scaled("12x8", 8), scaled(8, 8)) == ("96x64", 64)


@pytest.mark.parametrize(
    "given", ["96x", "x64", "96x64x3", "a", -64, 3, "3x64", "64x9999", True, 64.0, (96, 64), "0x64"]
)
def test_what_is_no_size_is_refused(given):
    with pytest.raises(RequestError, match="size"):
        Data(size=given)


def test_a_number_of_thousands_of_digits_is_refused():
    with pytest.raises(RequestError, match="thousands of digits"):
        Data(size=10**5000)


@pytest.mark.parametrize("word", ["96x3", "wide", "96 x 64", "96*64", "64,96", "(64, 96)", "64.0", "96x64x3", "64x0"])
def test_a_word_that_is_no_size_is_refused_with_an_example(word):
    with pytest.raises(FormatError, match="96x64"):
        parse_value(Size, [word])


def test_one_number_stays_one_number_in_a_file_of_settings():
    for size, line in ((64, "size = 64\n"), ("96x64", 'size = "96x64"\n'), ("64x64", "size = 64\n")):
        text = to_toml(Config(data=Data(size=size)))
        assert line in text
        assert from_toml(text, Config()).data.size == parse_size(size)
    assert from_toml('[data]\nsize = "48x32"', Config()).data.size == "48x32"
    with pytest.raises(RequestError, match=r"data\.size"):
        from_toml('[data]\nsize = "48x"', Config())


def test_sides_that_do_not_fit_are_named_with_a_size_that_does():
    rule = "a multiple of 8"
    check_sides(64, 96, lambda side: round(side / 8) * 8, rule)
    with pytest.raises(RequestError, match=r"size = 90x64.*multiple of 8.*88x64"):
        check_sides(64, 90, lambda side: round(side / 8) * 8, rule)
    with pytest.raises(RequestError, match=r"size = 30 must be a multiple of 8; try size = 32"):
        check_sides(30, 30, lambda side: round(side / 8) * 8, rule)


# What only `values.image_format` may know: the map of the values, the meaning of one and three channels, the shapes.


def _is_channels(node: ast.expr) -> bool:
    text = ast.unparse(node)
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value).endswith(".shape") and isinstance(node.slice, ast.Constant)
    return text.endswith("channels")


def _numbers(node: ast.expr) -> list[object]:
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return [part.value for part in parts if isinstance(part, ast.Constant)]


def _knows_the_format(node: ast.AST, docstrings: set[ast.AST]) -> str:
    if isinstance(node, ast.Constant) and node not in docstrings and "127.5" in str(node.value):
        return "the half range of bytes"
    if isinstance(node, ast.Compare) and _is_channels(node.left):
        found = [number for other in node.comparators for number in _numbers(other)]
        if (
            found
            and {1, 3} >= set(found)
            and not (ast.unparse(node.left).endswith("]") and len(found) == 1 == found[0])
        ):
            return "one is grey, three is RGB"
    if isinstance(node, ast.Dict) and {1, 3} <= {key.value for key in node.keys if isinstance(key, ast.Constant)}:
        return "one is grey, three is RGB"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.empty", "np.zeros", "np.full") and node.args:
        sides = ast.unparse(node.args[0])
        if "channels" in sides and ("size" in sides or "side" in sides or "height" in sides):
            return "the shape of images"
    return ""


def _offenders(tree: ast.Module) -> list[str]:
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    lone = {part.value for body in bodies for part in body if isinstance(part, ast.Expr)}
    return [f"{node.lineno}: {why}" for node in ast.walk(tree) if (why := _knows_the_format(node, lone))]


@pytest.mark.slow
def test_no_other_module_knows_the_values_and_channels_of_images():
    found = {place: _offenders(tree) for place, tree in trees().items() if Path(place).parts[0] != "values"}
    assert len(found) > 300
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "x0 = pixels / 127.5 - 1",
        'code = "((x + 1) * 127.5).round()"',
        "np.empty((0, size, size, channels), np.uint8)",
        "np.zeros((0, self.data.size, self.data.size, self.data.channels))",
        "if config.data.channels == 3: pass",
        "assert channels in (1, 3)",
        "if images.shape[3] not in (1, 3): pass",
        "if pixels.shape[1] == 3: pass",
        'kind = {1: "grey", 3: "RGB"}[channels]',
    ],
)
def test_a_module_that_knows_them_would_be_found(line):
    assert _offenders(ast.parse(f'"""127.5 in a docstring is none."""\n{line}\n')) != []
