"""Image grids, captioned strips and PNG files that are written atomically."""

from __future__ import annotations

import base64
import io
import math
import struct
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from unfog.files.safe_files import make_folder, open_file, read_file, write_atomic
from unfog.text import MARK
from unfog.values.image_format import to_pillow, to_rgb

Pixels = npt.NDArray[np.uint8]

_CELL = 128  # pixels that a small image is enlarged to, at most, so that a person sees something
_PAPER, _INK = 255, 64
_FONT_SIZE = 12
GAP = 2  # white pixels between the images of a grid
_LINE = _FONT_SIZE + 8
_BAR = 10  # height of a bar of colours
_BETWEEN = 12  # white pixels between groups of images
_MOST_LINES = 4  # of a caption below a group


def grid(
    images: Pixels,
    columns: int | None = None,
    scale: int | None = None,
    gap: int = GAP,
    row_names: Sequence[str] | None = None,
) -> Pixels:
    """Lay out uint8 [N, H, W] or [N, H, W, C], C = 1 (grey) or 3 (RGB), in one image uint8 [H', W', 3].

    Row by row in a layout near to a square, or in `columns`. With `row_names`, one for each image, every name
    begins a row, in the order in which names appear, and is written at the left. Enlarged by the integer
    `scale`, nearest neighbour; None: as far as a cell stays within 128 pixels. `gap`: white pixels between.
    """
    cells = _enlarged(_rgb(images), scale)
    if row_names is not None and len(row_names) != len(cells):
        raise ValueError(f"{len(row_names)} names for {len(cells)} images")
    rows = _rows(len(cells), columns, row_names)
    _, height, width, _ = cells.shape
    across, down = max(map(len, rows)), len(rows)
    paper = _paper(down * (height + gap) - gap, across * (width + gap) - gap)
    for i, row in enumerate(rows):
        for j, index in enumerate(row):
            y, x = i * (height + gap), j * (width + gap)
            paper[y : y + height, x : x + width] = cells[index]
    if row_names is None:
        return paper
    # A name that needs several rows is written at the first.
    names = [row_names[row[0]] for row in rows]
    names = [name if i == 0 or name != names[i - 1] else "" for i, name in enumerate(names)]
    return np.concatenate([_captions(names, height, gap), paper], axis=1)


def grid_of_pairs(above: Pixels, below: Pixels, columns: int) -> Pixels:
    """Lay out images uint8 [N, H, W, C] in rows, each over the row of its counterparts [N, H, W, C], as `grid`."""
    columns, shape = min(columns, len(above)), above.shape[1:]
    # White after the last image, so that its row is as long as the others, and the next row begins below it.
    white = np.full((-len(above) % columns, *shape), _PAPER, np.uint8)
    rows = [np.concatenate([each, white]).reshape(-1, columns, *shape) for each in (above, below)]
    return grid(np.stack(rows, 1).reshape(-1, *shape), columns)


def stack(grids: Sequence[Pixels]) -> Pixels:
    """Return grids uint8 [H, W, 3] of any sizes one below the other, at the left."""
    width = max(each.shape[1] for each in grids)
    parts = [np.concatenate([each, _paper(len(each), width - each.shape[1])], axis=1) for each in grids]
    gaps = [_paper(4 * GAP, width)] * (len(parts) - 1)
    return np.concatenate([part for pair in zip(parts, gaps) for part in pair] + parts[-1:])


def padded(images: Sequence[Pixels]) -> Pixels:
    """Return images uint8 [H, W, C] of any sizes as one array [N, H', W', C], each in the middle of white."""
    height, width = (max(each.shape[axis] for each in images) for axis in (0, 1))
    out = np.full((len(images), height, width, images[0].shape[2]), _PAPER, np.uint8)
    for place, each in zip(out, images):
        top, left = (height - each.shape[0]) // 2, (width - each.shape[1]) // 2
        place[top : top + each.shape[0], left : left + each.shape[1]] = each
    return out


def labelled_strip(
    rows: Mapping[str, Pixels], captions: Sequence[str], scale: int | None = None, gap: int = GAP
) -> Pixels:
    """The denoising strip: a column per noise level, captioned, and a named row per kind of image.

    `rows`: name -> uint8 [L, H, W] or [L, H, W, C], e.g. {"x_t": ..., "predicted x0": ...}, all of one shape;
    `captions`: L short texts, e.g. "t = 999". Returns uint8 [H', W', 3].
    """
    lengths = {len(images) for images in rows.values()}
    if lengths != {len(captions)}:
        raise ValueError(f"{len(captions)} captions for rows of {sorted(lengths)} images")
    images = np.concatenate([_rgb(images) for images in rows.values()])
    names = [name for name in rows for _ in captions]
    body = grid(images, columns=len(captions), scale=scale, gap=gap, row_names=names)
    cell = _enlarged(images[:1], scale).shape[2]
    return with_column_captions(body, captions, cell, gap)


def with_column_captions(body: Pixels, captions: Sequence[str], cell: int, gap: int = GAP) -> Pixels:
    """Return a grid, uint8 [H, W, 3], below captions of its columns, in lines of `cell` pixels, four at most."""
    return np.concatenate([_column_captions(captions, cell, body.shape[1], gap), body])


def _column_captions(captions: Sequence[str], cell: int, width: int, gap: int = GAP) -> Pixels:
    """Return lines with a caption for each of the columns at the right, uint8 [H, width, 3]."""
    offset = width - len(captions) * (cell + gap) + gap
    lines = [_wrapped(caption, cell) for caption in captions]
    most = max(map(len, lines))
    head = Image.fromarray(_paper(_LINE * max(1, most), width))
    draw = ImageDraw.Draw(head)
    for column, parts in enumerate(lines):
        centre = offset + column * (cell + gap) + cell / 2
        for i, line in enumerate(parts, most - len(parts)):  # the last line is next to the images
            draw.text((centre, (i + 0.5) * _LINE), line, (_INK,) * 3, _font(), anchor="mm")
    return np.asarray(head)


def captioned_grid(images: Pixels, across: Sequence[str], down: Sequence[str] = ()) -> Pixels:
    """Return images uint8 [N, H, W, C], row by row, as one picture with a caption above each column and left of a row.

    As many columns as `across` has captions; `down` is a caption for each row, or () without rows of captions.
    """
    body = grid(images, len(across))
    cell = (body.shape[1] + GAP) // len(across) - GAP
    if down:
        height = (body.shape[0] + GAP) // len(down) - GAP
        body = np.concatenate(
            [_captions([printable_name(name, str(i)) for i, name in enumerate(down)], height, GAP), body], 1
        )
    return with_column_captions(body, [printable_name(name, str(i)) for i, name in enumerate(across)], cell)


def captioned_groups(parts: Mapping[str, Pixels], captions: Sequence[str]) -> Pixels:
    """Return pictures that belong together side by side, each group above its caption, in a layout near to a square.

    `parts`: name -> uint8 [N, H, W] or [N, H, W, C], all of one shape; the i-th of each are a group. The names stand
    above the first row, unless all are "". `captions`: N texts, in at most four lines of the width of a group each,
    or "". Returns uint8 [H', W', 3].
    """
    names = list(parts)
    images, count = [_enlarged(_rgb(part), None) for part in parts.values()], len(captions)
    groups = [grid(np.stack([part[i] for part in images]), len(names), 1) for i in range(count)]
    cell, width = images[0].shape[2], groups[0].shape[1]
    across = min(count, math.ceil(math.sqrt(count / len(names))))
    lines = [_wrapped(printable_name(text, str(i)), width) for i, text in enumerate(captions)]
    rows = list[Pixels]()
    for first in range(0, count, across):
        row = range(first, min(first + across, count))
        most = max(len(lines[i]) for i in row)
        made = [np.concatenate([groups[i], _caption_lines(lines[i], most, width)]) for i in row]
        gap = _paper(len(made[0]), _BETWEEN)
        rows.append(np.concatenate([part for one in made for part in (one, gap)][:-1], 1))
    if not any(names):
        return stack(rows)
    head = _column_captions(names, cell, width)
    heads = [head, _paper(len(head), _BETWEEN)] * across
    return np.concatenate([np.concatenate(heads[:-1], 1), stack(rows)])


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines of at most `width` pixels, four at most."""
    lines = [_fitted(line, width) for line in _joined(text.split(), " ", width)]
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], f"{_fitted(lines[_MOST_LINES - 1], width - 14)}…"]
    return lines


def _joined(parts: Sequence[str], between: str, width: int) -> list[str]:
    """Return texts joined to lines, each of as many as fit in `width` pixels, or of one."""
    lines = list[str]()
    for part in parts:
        if lines and _font().getlength(longer := f"{lines[-1]}{between}{part}") <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _caption_lines(lines: Sequence[str], count: int, width: int) -> Pixels:
    """Return lines of text at the left, with room for `count` of them, uint8 [H, W, 3]."""
    image = Image.fromarray(_paper(_LINE * count, width))
    draw = ImageDraw.Draw(image)
    for i, line in enumerate(lines):
        draw.text((0, (i + 0.5) * _LINE), line, (_INK,) * 3, _font(), anchor="lm")
    return np.asarray(image)


def with_caption(body: Pixels, parts: Sequence[str]) -> Pixels:
    """Return an image, uint8 [H, W, 3], below the parts of its caption, in as many lines as they need."""
    width = body.shape[1]
    lines = [line for joined in _joined(parts, ", ", width) for line in _wrapped(joined, width)]
    return np.concatenate([_caption_lines(lines, len(lines), width), body])


def with_bar(body: Pixels, colours: Pixels, values: Sequence[str]) -> Pixels:
    """Return an image, uint8 [H, W, 3], above a bar of colours [L, 3] with values at equal distances below it."""
    width, levels = body.shape[1], len(colours)
    bar = np.repeat(colours[None, np.arange(width) * levels // width], _BAR, axis=0)
    foot = Image.fromarray(_paper(_LINE, width))
    draw, cell = ImageDraw.Draw(foot), width / len(values)
    for i, value in enumerate(values):
        share = i / max(1, len(values) - 1)
        anchor = "lm" if i == 0 else "rm" if i == len(values) - 1 else "mm"
        draw.text((share * width, _LINE / 2), _fitted(value, cell), (_INK,) * 3, _font(), anchor=anchor)
    return np.concatenate([body, _paper(3 * GAP, width), bar, np.asarray(foot)])


# Of a picture of a run, which a stranger may have sent. Ours of 16 images of 1024 pixels has up to 50 MB.
_LARGEST_PNG, MOST_PIXELS, _MOST_CHUNKS = 2**26, 2**26, 10_000


def encode_png(pixels: Pixels, text: Mapping[str, str] | None = None) -> bytes:
    """Encode uint8 [H, W] or [H, W, C], C = 1 to 4, as PNG, with `text` by keyword and the mark of Unfog."""
    encoded, info = io.BytesIO(), PngInfo()
    info.add_text("Software", MARK)  # first, so that reading the beginning of a file is enough to recognise it
    for keyword, value in (text or {}).items():
        info.add_text(keyword, value)
    to_pillow(pixels).save(encoded, "PNG", pnginfo=info)
    return encoded.getvalue()


def save_png(path: Path, root: Path, pixels: Pixels, text: Mapping[str, str] | None = None) -> None:
    """Write uint8 [H, W] or [H, W, C], C = 1 to 4, as a PNG file below `root`, whole or not at all."""
    root.mkdir(parents=True, exist_ok=True)
    make_folder(path.parent, root)
    write_atomic(path, encode_png(pixels, text), root)


def png_data_uri(path: Path, root: Path, width: int) -> tuple[str, int] | None:
    """A PNG file as (`data:` URI, pixels across), made smaller if wider than `width`; None if unreadable or linked."""
    try:
        data = read_file(path, root, _LARGEST_PNG)
        image = decode_png(data)  # also where the bytes are used as they are: a damaged file must not get into the page
    except (OSError, ValueError):
        return None
    across = min(image.width, width)
    if across < image.width:
        size = (width, max(1, round(image.height * width / image.width)))
        data = encode_png(np.asarray(image.convert("RGB").resize(size, Image.Resampling.LANCZOS)))
    return f"data:image/png;base64,{base64.b64encode(data).decode()}", across


def read_png(path: Path, root: Path) -> Image.Image:
    """Read a picture of a run. OSError if it is unreadable or a link; ValueError if it is not a PNG of usual size."""
    with open_file(path, "rb", root) as file:
        return decode_png(file.read(_LARGEST_PNG + 1))


def decode_png(data: bytes) -> Image.Image:
    """Decode a PNG, whatever its name says, and nothing else. ValueError if it cannot be decoded, or is too large."""
    if len(data) > _LARGEST_PNG:
        raise ValueError(f"it has over {_LARGEST_PNG >> 20} MB")
    if not data.startswith(b"\x89PNG\r\n\x1a\n") or len(data) < 24:
        raise ValueError("it is not a PNG")
    if math.prod(struct.unpack(">II", data[16:24])) > MOST_PIXELS:
        raise ValueError(f"it has over {MOST_PIXELS / 1e6:.0f} megapixels")
    at = 8
    for _ in range(_MOST_CHUNKS):
        if at >= len(data):
            break
        at += 12 + int.from_bytes(data[at : at + 4])
    else:
        raise ValueError(f"it has over {_MOST_CHUNKS:,} chunks")
    try:
        # No other format: among Pillow's readers is one that starts Ghostscript.
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            image.load()
            return image
    except Exception as error:  # Pillow fails in nearly any way on a damaged file
        raise ValueError(f"it is not a PNG that can be read ({type(error).__name__})") from error


def _rgb(images: Pixels) -> Pixels:
    if not len(images):
        raise ValueError(f"expected at least one uint8 image, got {images.dtype} {list(images.shape)}")
    return to_rgb(images[..., None] if images.ndim == 3 else images)


def _enlarged(images: Pixels, scale: int | None) -> Pixels:
    factor = max(1, _CELL // max(images.shape[1:3])) if scale is None else scale
    return images.repeat(factor, axis=1).repeat(factor, axis=2)


def _rows(count: int, columns: int | None, row_names: Sequence[str] | None) -> list[list[int]]:
    """The indices of the images in each row."""
    groups: dict[str, list[int]] = {}
    for index in range(count):
        groups.setdefault("" if row_names is None else row_names[index], []).append(index)
    if columns is None:
        # Names ask for a row each; 12 wide is what a page shows.
        columns = math.ceil(math.sqrt(count)) if row_names is None else 12
    return [group[i : i + columns] for group in groups.values() for i in range(0, len(group), columns)]


def _captions(names: Sequence[str], height: int, gap: int) -> Pixels:
    """Names of rows, at the left of them: uint8 [H, W, 3]."""
    names = [name if len(name) <= 24 else f"{name[:23]}…" for name in names]
    width = max(math.ceil(_font().getlength(name)) for name in names) + 12
    image = Image.fromarray(_paper(len(names) * (height + gap) - gap, width))
    draw = ImageDraw.Draw(image)
    for i, name in enumerate(names):
        draw.text((width - 6, i * (height + gap) + height / 2), name, (_INK,) * 3, _font(), anchor="rm")
    return np.asarray(image)


def printable_name(name: str, otherwise: str) -> str:
    """A name without its accents, as the font of our images has none; `otherwise` if it lacks a letter even so."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c))
    font: Any = _font()  # its masks are bytes, but its type hints omit that
    no_glyph = bytes(font.getmask("\uffff"))  # no character, so this is the box of a missing letter
    return otherwise if any(bytes(font.getmask(c)) == no_glyph for c in plain) else plain


def _fitted(text: str, width: int) -> str:
    while len(text) > 1 and _font().getlength(text) > width:
        text = text[:-1]
    return text


def _paper(height: int, width: int) -> Pixels:
    return np.full((height, width, 3), _PAPER, np.uint8)


def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_FONT_SIZE)
