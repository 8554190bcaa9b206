"""A source of pictures that need their texts, and the format of such texts."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from unfog.data.sources.base import Source
from unfog.values import condition_kinds
from unfog.values.columns import Column
from unfog.values.condition_format import ConditionFormat
from unfog.values.condition_kinds import ColumnFacts, ConditionKind

VOCABULARY, LENGTH = 256, 6
COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "y": (255, 255, 0)}


class _TextKind(ConditionKind):
    name, field = "text", "tokens"

    def facts(self, column):
        return ColumnFacts(column.name, column.kind, statistics=(float(VOCABULARY), float(column.values.shape[1])))

    def inputs(self, facts):
        return 0

    def width(self, facts):
        return int(facts.statistics[1])

    def tensor(self, columns):
        return torch.from_numpy(np.asarray(columns[0], np.int64))

    def parse(self, facts, word):
        return tuple(tokens_of(word, self.width(facts)))

    def usual(self, facts):
        return ((-1,) * self.width(facts),)

    def show(self, facts, value):
        return bytes(each for each in value if each >= 0).decode()


if "text" not in condition_kinds.KINDS:
    condition_kinds.KINDS["text"] = _TextKind()


def format_of_texts(length: int = LENGTH, layers: int = 2, width: int = 32, **others) -> ConditionFormat:
    facts = ColumnFacts("text", "text", statistics=(float(VOCABULARY), float(length)))
    return ConditionFormat(columns=(facts,), text_layers=layers, text_width=width, **others)


def tokens_of(text: str, length: int = LENGTH) -> list[int]:
    return [*text.encode(), *[-1] * (length - len(text.encode()))]


def square(text: str, side: int) -> np.ndarray:
    """A square of a colour, bright or dark, such as "r d" for dark red: uint8 [side, side, 3]."""
    colour, _, shade = text.partition(" ")
    return np.full((side, side, 3), COLOURS[colour], np.uint8) // (3 if shade == "d" else 1)


TEXTS = [f"{colour} {shade}" for colour in COLOURS for shade in "bd"]


class Squares(Source):
    """So many squares as the file says, each with its text."""

    suffixes = (".squares",)

    def __init__(self, location):
        super().__init__(location)
        count = int(Path(location.paths[0]).read_text())
        self.texts = [TEXTS[i % len(TEXTS)] for i in range(count)]
        self.names = [f"{i:04}.png" for i in range(count)]
        self.columns = {"text": Column("text", "text", np.array([tokens_of(text) for text in self.texts], np.int64))}

    def open(self, i):
        return Image.fromarray(square(self.texts[i], 8))

    def stamp(self):
        return str(self.texts), len(self.texts)
