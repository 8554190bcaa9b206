"""A source of pictures that need their texts, and the format of such texts."""

from pathlib import Path

import numpy as np
from PIL import Image

from unfog.data.sources.base import Source
from unfog.values.columns import Column
from unfog.values.condition_format import ConditionFormat
from unfog.values.condition_kinds import ColumnFacts

VOCABULARY, LENGTH = 256, 6
COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "y": (255, 255, 0)}


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
