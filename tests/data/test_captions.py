"""Captions as conditions: where they are read from, how they are counted, and that they are part of a set."""

import json
import shutil
import zipfile

import numpy as np
import pytest
from PIL import Image

from unfog.config.schema import Config
from unfog.data.columns.captions import MOST_CAPTIONS, MOST_LENGTH, caption_column, has_caption_files
from unfog.data.columns.conditions import with_conditions
from unfog.data.dataset import ImageSet
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.arrays import ArraySource
from unfog.data.sources.registry import open_source
from unfog.data.stream import ImageStream
from unfog.errors import RequestError
from unfog.pipeline.load_data import load_images
from unfog.process.signals import StopSignals
from unfog.values.condition_format import ConditionFormat, conditions_of, facts_of
from unfog.values.tokenizer import tokenizer_of

TEXTS = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("heart", "star", "moon", "sun")]
NAMES = [f"{i:02}.png" for i in range(12)]


def folder(path, texts=TEXTS, way="txt"):
    """Make a folder of images with these captions."""
    path.mkdir()
    for i, (name, text) in enumerate(zip(NAMES, texts)):
        Image.new("L", (8, 8), 20 * i).save(path / name)
        if way == "txt" and text is not None:
            content = text if isinstance(text, bytes) else text.encode()
            (path / name).with_suffix(".txt").write_bytes(content)
    if way in ("csv", "caption"):
        rows = [f'{name},"{text}"' for name, text in zip(NAMES, texts)]
        (path / "metadata.csv").write_text("\n".join([f"file_name,{'text' if way == 'csv' else way}", *rows]))
    if way == "jsonl":
        rows = [json.dumps({"file_name": name, "text": text}) for name, text in zip(NAMES, texts)]
        (path / "metadata.jsonl").write_text("\n".join(rows))
    return path


def loaded(path, condition="text"):
    return prepare(open_source(str(path)), Data(condition=condition, size=8, held_out=0.0))


def texts_of(dataset, name="text"):
    column = dataset.train.columns[name]
    tokenizer = tokenizer_of(column.categories)
    return [tokenizer.decode(row) for row in column.values.reshape(len(column.values), -1)]


def column(cells, warn=lambda line: None, training=None):
    rows = np.arange(len(cells)) if training is None else np.array(training)
    return caption_column("text", cells, [f"{i}.png" for i in range(len(cells))], lambda: rows, warn)


def test_captions_are_the_same_wherever_they_are(tmp_path):
    sets = [loaded(folder(tmp_path / way, way=way)) for way in ("txt", "csv", "jsonl")]
    sets.append(loaded(shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "txt")))
    pixels = np.stack([np.full((8, 8, 1), 20 * i, np.uint8) for i in range(12)])
    sets.append(loaded(ArraySource.store(pixels, conditions={"text": TEXTS})))
    assert texts_of(sets[0]) == TEXTS
    tokens = [each.train.columns["text"].values for each in sets]
    assert all(np.array_equal(each, tokens[0]) for each in tokens)
    assert len({each.train.fingerprint for each in sets[:4]}) == 1


def test_a_caption_column_is_known_by_its_name_or_its_kind(tmp_path):
    named = folder(tmp_path / "caption", way="caption")
    assert texts_of(loaded(named, "caption"), "caption") == TEXTS
    renamed = folder(tmp_path / "other", way="csv")
    table = renamed / "metadata.csv"
    table.write_text(table.read_text().replace("file_name,text", "file_name,says"))
    with pytest.raises(RequestError, match="says:text"):
        loaded(renamed, "says")
    assert texts_of(loaded(renamed, "says:text"), "says") == TEXTS


def test_a_changed_caption_is_another_set(tmp_path):
    path = folder(tmp_path / "txt")
    before = loaded(path).train.fingerprint
    (path / "03.txt").write_text("a red moon")
    assert loaded(path).train.fingerprint != before


def test_odd_files_are_read_or_named(tmp_path):
    odd = [
        *(
            "a red heart".encode("utf-16"),
            b"\xef\xbb\xbfa red star",
            "a café".encode("latin-1"),
            b"",
            None,
            b"a\0red\0sun",
        ),
        *(b"a blue sun " * 100_000, "\u202ea blue moon".encode(), "a blue star".encode("utf-16-le")),
        *("a red heart", "😀 a red star", "a café"),
    ]
    path = folder(tmp_path / "txt", odd)
    dataset = loaded(path)
    found = texts_of(dataset)
    assert found[:6] == ["a red heart", "a red star", "a café", "", "", "a red sun"]
    assert found[7:] == ["a blue moon", "a blue star", "a red heart", "😀 a red star", "a café"]
    assert found[6].startswith("a blue sun a blue")
    tokens = dataset.train.columns["text"].values
    assert (tokens[3] == -1).all()
    (line,) = dataset.warnings
    for said in ("1 not in UTF-8", "02.png", "NUL", "larger than 64 KB", f"longer than {MOST_LENGTH} tokens"):
        assert said in line
    assert "1 empty (such as 03.png)" in line


def test_links_and_folders_in_place_of_captions_are_not_read(tmp_path):
    path = folder(tmp_path / "txt")
    (path / "00.txt").unlink()
    (path / "00.txt").mkdir()
    (path / "01.txt").unlink()
    (path / "01.txt").symlink_to("/dev/zero")
    dataset = loaded(path)
    assert texts_of(dataset)[:3] == ["", "", "a red moon"]
    (line,) = dataset.warnings
    assert line == "text: 2 with a text file that is a folder, a broken link or a device (such as 00.png, 01.png)"


def test_images_without_a_caption_are_counted_among_those_that_train(tmp_path, capsys):
    path = folder(tmp_path / "txt", [None, *TEXTS[1:10], None, None])
    (path / "11.png").write_bytes(b"no picture")  # neither it nor its caption count
    data = Data(condition="text", size=8, held_out=0.0)
    load_images(Config(source=str(path), data=data), StopSignals())
    said = "".join(capsys.readouterr())
    assert "2 of the 11 training images have no caption (such as 00.png)" in said
    assert said.count("caption (") == 1
    assert "text file" not in said


def test_text_files_may_hold_classes(tmp_path):
    path = folder(tmp_path / "txt", ["heart\n", "star"] * 6)
    (path / "00.txt").unlink()
    (path / "00.txt").mkdir()
    made = loaded(path, "text:category").train.columns["text"]
    assert made.categories == ("heart", "star")
    assert made.values[:3].tolist() == [-1, 1, 0]


def test_large_texts_of_an_archive_are_not_unpacked(tmp_path):
    path = folder(tmp_path / "txt", [*TEXTS[:11], b"a red sun " * 10**6])
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", path)
    source = open_source(archive)
    assert source.read_beside(11, ".txt", 1000) == (b"a red sun " * 100)
    assert source.read_beside(0, ".txt", 1000) == b"a red heart"
    assert source.read_beside(0, ".json", 1000) is None


def test_several_captions_come_in_turn():
    cells = [b"one red heart\n\nred hearts\n", ["a star", "one star", "this star"], "a moon", None]
    made = column(cells * 3)
    assert made.values.shape[:2] == (12, 3)
    images = ImageSet(np.zeros((12, 1, 8, 8), np.uint8), [str(i) for i in range(12)], {"text": made})
    stream, tokenizer = ImageStream(images, seed=0), tokenizer_of(made.categories)
    drawn: dict[int, list[str]] = {}
    for first in range(0, 12 * 6, 12):
        batch = stream.batch(first, 12)
        assert all(
            (part == whole).all()
            for start in (0, 5)
            for part, whole in zip(stream.batch(first + start, 7).conditions.tokens, batch.conditions.tokens[start:])
        )
        for row, tokens in zip(batch.index.tolist(), batch.conditions.tokens.tolist()):
            drawn.setdefault(row, []).append(tokenizer.decode(tokens))
    assert sorted(drawn[0]) == ["one red heart"] * 3 + ["red hearts"] * 3
    assert sorted(drawn[1]) == ["a star"] * 2 + ["one star"] * 2 + ["this star"] * 2
    assert drawn[2] == ["a moon"] * 6
    assert drawn[3] == [""] * 6
    assert tokenizer.decode(conditions_of([made]).tokens[1].tolist()) == "a star"
    (given,) = ConditionFormat(columns=facts_of([made])).rows([made], np.array([1]))
    assert tokenizer.decode(given[1][0]) == "a star"


def test_what_is_remarkable_is_one_line():
    lines = []
    column([["a b"] * 20, "a\0b", "word " * 100, *(["one", "two"] * 200)], lines.append)
    (line,) = lines
    for said in (f"more than {MOST_CAPTIONS} captions", "NUL", "cut there"):
        assert said in line
    column(TEXTS, lines.append)
    assert len(lines) == 1


def test_the_tokenizer_and_the_length_are_those_of_the_training_images():
    made = column([*TEXTS, *["held held out words " * 4] * 4], training=range(12))
    assert "held" not in "".join(made.categories)
    assert made.values.shape == (16, 16)


def test_sets_without_captions_are_refused(tmp_path):
    for cells in ([None, "", "NA"], ["one"] * 5):
        with pytest.raises(RequestError, match="cannot be a condition"):
            column(cells)
    bare = folder(tmp_path / "bare", [None] * 12)
    with pytest.raises(RequestError, match="text files beside"):
        with_conditions(open_source(str(bare)), "text")
    both = folder(tmp_path / "both")
    (both / "metadata.csv").write_text("\n".join(["file_name,says", *map(",".join, zip(NAMES, TEXTS))]))
    with pytest.raises(RequestError, match="one such column"):
        with_conditions(open_source(str(both)), "text,says:text")


def test_text_files_that_cannot_be_read_are_no_reason_to_stop(tmp_path):
    images = folder(tmp_path / "images")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for path in sorted(images.iterdir()):
            archive.write(path, path.name, zipfile.ZIP_LZMA if path.suffix == ".txt" else zipfile.ZIP_STORED)
    assert has_caption_files(open_source(str(tmp_path / "a.zip")))


def test_digits_are_captions_with_0():
    found = column([0, 7, 0, 7])
    assert tokenizer_of(found.categories).decode(found.values[0]) == "0"
