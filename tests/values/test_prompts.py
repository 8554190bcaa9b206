"""Prompts: captions that samples are asked for, their names, and what is refused."""

import codecs

import numpy as np
import pytest
from PIL import Image

from unfog.config.requests.sample import SampleRequest
from unfog.config.schema import Config
from unfog.config.toml import from_toml, to_toml
from unfog.data.columns.captions import caption_column
from unfog.data.columns.kinds import column_of
from unfog.errors import RequestError
from unfog.pipeline.sample_folder import SampleFolder
from unfog.values.columns import Column
from unfog.values.condition_format import ConditionFormat, facts_of
from unfog.values.condition_kinds import ColumnFacts

CAPTIONS = ["a red heart, left", "a blue heart", "a red star", "a blue star"] * 3
NAMES = [f"{i}.png" for i in range(12)]


def columns() -> list[Column]:
    text = caption_column("text", CAPTIONS, NAMES, lambda: np.arange(12))
    return [column_of("age", [str(i) for i in range(12)], NAMES), text]


@pytest.fixture(name="format")
def _format() -> ConditionFormat:
    return ConditionFormat(columns=facts_of(columns()))


def test_prompts_are_cycled_through_and_name_the_samples(format):
    given = format.parse(format.with_prompts({}, ["A red star", "a blue heart"]))
    assert format.names(given, 4) == ["a red star", "a blue heart"]
    assert format.conditions(given, range(4)).tokens.shape == (4, 16)
    assert format.names(format.parse({"text": "a red star", "age": 5}), 1)[0] == "age=5 a red star"
    both = format.conditions(format.parse(format.with_prompts({"age": [1, 2]}, "a star")), range(2))
    assert both.numbers[:, 0].tolist() == [1, 2]


def test_captions_of_pictures_quote_texts_and_names_of_files_keep_numbers(tmp_path):
    statistics = (0.0, 1.0, -900.0, 90000.0)
    numbers = (
        ColumnFacts("angle", "number", statistics=statistics),
        ColumnFacts("width", "number", statistics=statistics),
    )
    format = ConditionFormat(columns=(numbers[0], *facts_of(columns()[1:]), numbers[1]))
    given = format.parse({"angle": [87.3344, 0.5], "text": "a blue heart, a red star", "width": [3.66568, 2024.0]})
    assert format.captions(given, 2)[:2] == [
        'angle=87.3, "a blue heart, a red star", width=3.67',
        'angle=0.5, "a blue heart, a red star", width=2024',
    ]
    close = format.parse({"width": [1234.25, 1234.5, None]})
    assert format.captions(close, 3)[:3] == ["width=1234.2", "width=1234.5", ""]
    assert format.captions(format.parse({"text": "a star"}), 1)[0] == "a star"
    folder = SampleFolder(tmp_path, "", 2, format.names(given, 2), short_names=format.file_names(given, 2))
    assert folder.file(0).name == "000000-angle_87_3344_a_blue_heart_width_3_66568.png"
    assert SampleFolder(tmp_path, "", 1, files=["000000-anna"]).file(0).name == "000000-anna.png"
    assert folder.names[0] == "angle=87.3344 a blue heart, a red star width=3.66568"


def test_a_comma_is_a_part_of_a_caption(format):
    assert format.read_words(["text=a red heart, left", "age=1,2"]) == {
        "text": ["a red heart, left"],
        "age": ["1", "2"],
    }


def test_no_prompt_is_any_caption(format):
    for given in ({}, {"text": ""}, format.with_prompts({}, ()), format.with_prompts({}, None)):
        tokens = format.conditions(format.parse(given), [0]).tokens
        assert (tokens == -1).all()
    assert format.concerns(format.parse({})) == []


def test_rare_words_are_named(format):
    (line,) = format.concerns(format.parse({"text": ["a red heart", "a mauve heart", "a mauve heart"]}))
    assert "'mauve'" in line
    assert "heart" not in line


def test_prompts_that_cannot_be_drawn_are_refused(format):
    with pytest.raises(RequestError, match="captions"):
        ConditionFormat(("cat", "dog")).with_prompts({}, "a cat")
    with pytest.raises(RequestError, match="the same"):
        format.with_prompts({"text": "a"}, "b")
    with pytest.raises(RequestError, match="must be a text"):
        format.parse(format.with_prompts({}, [3]))
    for huge in ("x" * 10**6, "a red heart " * 90_000):  # read no further than it can be drawn
        with pytest.raises(RequestError, match=f"prompt of {len(huge):,} characters is longer than the 16 tokens"):
            format.parse({"text": [huge]})
    with pytest.raises(RequestError, match="prompt of 18 tokens is longer than the 16 tokens"):
        format.parse({"text": "a red heart " * 6})
    spaces = " " * 5000
    assert format.parse({"text": f"{spaces}a red heart{spaces}"}) == format.parse({"text": "a red heart"})
    with pytest.raises(RequestError, match="one such column"):
        ConditionFormat(columns=facts_of([*columns(), caption_column("says", CAPTIONS, NAMES, lambda: np.arange(12))]))


def test_a_run_keeps_its_tokenizer(format):
    config = Config(source="x", columns=format.columns)
    read = from_toml(to_toml(config), Config(source="x"))
    assert read.conditions.parse({"text": "a red star"}) == format.parse({"text": "a red star"})
    assert "tokens" in str(read.columns[1])


def test_prompts_of_a_file(tmp_path):
    def read(content: bytes) -> tuple[str, ...]:
        (tmp_path / "prompts.txt").write_bytes(content)
        return SampleRequest(run=tmp_path, prompts=tmp_path / "prompts.txt").read_prompts()

    assert read("\ufeffa red heart\r\n\n  über\u2028alles \n".encode()) == ("a red heart", "über\u2028alles")
    for encoding in ("utf-16-le", "utf-16-be"):  # as Notepad writes "Unicode"
        assert read("\ufeffa red heart\r\nüber".encode(encoding)) == ("a red heart", "über")
    for mark, encoding in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        with pytest.raises(
            RequestError, match=r"prompts = .* is not text in UTF-16 \(line 2, byte 7\); save it as UTF-8"
        ):
            read(mark + "Ċ\n".encode(encoding) + b"a")  # the letter has a byte of a new line
    assert SampleRequest(run=tmp_path, prompt=("a", "b")).read_prompts() == ("a", "b")
    for wrong in (b"", b"\n \n", "über".encode("latin-1")):
        with pytest.raises(RequestError, match="prompts ="):
            read(wrong)
    with pytest.raises(RequestError, match="cannot be read"):
        SampleRequest(run=tmp_path, prompts=tmp_path / "none.txt").read_prompts()
    with pytest.raises(RequestError, match="one of them"):
        SampleRequest(run=tmp_path, prompts=tmp_path, prompt=("a",))


def test_names_of_files_are_short_and_safe(tmp_path, format):
    words = ["../../x", "aaaaaaa", "🎉 日本語", "\u202egnp.exe"]
    for word in words:
        (name,) = format.names(format.parse({"text": [word[:7]]}), 1)[:1]
        file = SampleFolder(tmp_path, "", 1, [name]).file(0)
        assert file.parent == tmp_path
        assert len(file.name.encode()) < 200


def test_a_negative_prompt_is_in_the_files(tmp_path, format):
    tokens = format.read_negative(" A dark  STAR")
    assert tokens == format.parse({"text": "a dark star"})[1][1][0]
    folder = SampleFolder(tmp_path, "", 1, ["a heart"])
    folder.negative = format.show_text(tokens)
    folder.write(range(1), np.zeros((1, 4, 4, 3), np.uint8))
    (file,) = tmp_path.glob("*.png")
    assert file.name == "000000-a_heart-not_a_dark_star.png"
    assert Image.open(file).text["Negative"] == "a dark star"
    folder.names, folder.negative = ["𠀀" * 99], "𠀀" * 99
    assert len(folder.file(0).name.encode()) < 250
    assert format.read_negative("") == format.read_negative(" \n") == format.read_negative("\u200b") == ()
    for wrong, said in ((3, "one text"), (["a"], "one text"), ("heart " * 99, "longer")):
        with pytest.raises(RequestError, match=said):
            format.read_negative(wrong)
    with pytest.raises(RequestError, match="learned captions"):
        ConditionFormat(("cat", "dog")).read_negative("dark")
    assert ConditionFormat(("cat", "dog")).read_negative("") == ()
