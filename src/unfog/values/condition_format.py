"""`ConditionFormat`: the conditions of a run, a fact of its data as class names are. Imports no torch."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

from unfog.errors import RequestError
from unfog.text import valid_text

if TYPE_CHECKING:
    from unfog.values.conditions import Conditions

AUGMENT_INPUTS = 9
"""Length of `Conditions.augment`."""


@dataclass(frozen=True)
class ConditionFormat:
    """Categories or size of each condition of `Conditions`; one that is empty is absent."""

    classes: tuple[str, ...] = ()
    """Names of the classes; label i is the i-th of them."""
    augment_inputs: int = 0
    """Length of the augmentation condition."""

    @property
    def can_be_dropped(self) -> bool:
        """True if images have a condition that `Conditions.dropped` hides."""
        return bool(self.classes)

    def blank(self, count: int) -> Conditions:
        """Return conditions of so many images, all zeros and not augmented, to measure with."""
        import torch

        from unfog.values.conditions import Conditions

        return Conditions(torch.zeros(count, dtype=torch.int64) if self.classes else None)

    def parse_labels(self, words: Sequence[object]) -> tuple[int, ...]:
        """Return labels by class name or number; all classes if `words` is empty. RequestError for an unknown one.

        An integer is the number of a class, a text its name; where no name is a number, a text may be a number.
        """
        classes = self.classes
        if words and not classes:
            raise RequestError(f"label = {words[0]!r}, but this run has no classes; omit --label")
        composed = [unicodedata.normalize("NFC", name) for name in classes]
        labels, names_are_numbers = [], any(name.isdecimal() for name in classes)
        for word in words:
            # A word of a command line in a locale without UTF-8 is spelled as the name of a folder is.
            text, label = unicodedata.normalize("NFC", valid_text(str(word))), -1
            if not isinstance(word, bool) and isinstance(word, Integral):
                label = int(word)
            elif text in composed:
                label = classes.index(str(word)) if str(word) in classes else composed.index(text)
            elif text.isdecimal() and not names_are_numbers:
                label = int(text)
            if not 0 <= label < len(classes):
                raise RequestError(f"label = {text!r} is not a class of this run; give one of {', '.join(classes)}")
            labels.append(label)
        return tuple(labels) or tuple(range(len(classes)))
