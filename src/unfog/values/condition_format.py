"""`ConditionFormat`: the conditions of a run, a fact of its data as class names are. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from unfog.errors import RequestError
from unfog.text import suggest
from unfog.values.columns import CLASS, Column
from unfog.values.condition_kinds import KINDS, ColumnFacts, ConditionKind, Span, kind_of
from unfog.values.condition_requests import (
    MOST_CELLS,
    CellNames,
    ConditionGrid,
    GuidanceScale,
    Weights,
    axis_values,
    in_turn,
)
from unfog.values.kinds.image_kinds import IMAGE_KINDS, image_columns
from unfog.values.kinds.text_kind import TextKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from unfog.values.conditions import Conditions

TEXT = "text"
"""Name of the kind of columns that hold texts."""
TEXT_HEAD = 32
"""Channels of one attention head of the encoder of texts, a divisor of its width."""
# Here, as their modules need the base that the module of `KINDS` has.
KINDS.update({TextKind.name: TextKind(), **IMAGE_KINDS})

AUGMENT_INPUTS = 9
"""Length of `Conditions.augment`."""
Shown: TypeAlias = tuple[ColumnFacts, str]
"""A value of a column as text."""
Given: TypeAlias = tuple[tuple[str, tuple[Any, ...]], ...]
"""Conditions of samples: (name of a column, values that the samples cycle through), each column by itself."""
_MOST_CONCERNS = 3  # lines on values of one column
_NUMBERS = ("number", "vector")  # kinds whose values are numbers
LONGEST_FILE_NAME = 40
"""Characters of conditions in the name of a file."""
_LONGEST_CYCLE = 1000  # names of samples that columns of different lengths have together


def conditions_of(columns: Iterable[Column], turn: NDArray[np.int64] | None = None) -> Conditions:
    """Return the conditions of B images from their columns, with values [B, …], on the CPU.

    `turn` [B] picks one of several captions of each image; None picks the first.
    """
    from unfog.values.conditions import Conditions

    parts: dict[str, list[NDArray[Any]]] = {}
    makers = dict[str, ConditionKind]()  # all kinds of one field make the same of their values
    for column in sorted(columns, key=lambda each: each.name):
        kind = kind_of(column.kind)
        makers.setdefault(kind.field, kind)
        parts.setdefault(kind.field, []).append(kind.pick(column.values, turn))
    return Conditions(**{field: makers[field].tensor(values) for field, values in parts.items()})


@dataclass(frozen=True)
class PretrainedText:
    """A frozen encoder of texts, as found when the run began."""

    folder: str
    sha256: str
    """Digest of its files."""
    width: int
    """D of its tokens."""
    length: int
    """Tokens of a text, at most."""


@dataclass(frozen=True)
class ConditionFormat:
    """Categories, statistics or size of each condition of `Conditions`; one that is empty is absent."""

    classes: tuple[str, ...] = ()
    """Names of the classes; label i is the i-th of them."""
    augment_inputs: int = 0
    """Length of the augmentation condition."""
    columns: tuple[ColumnFacts, ...] = ()
    """Facts on all columns but the class, in the order of their names."""
    mask_channels: int = 0
    """Channels of `Conditions.known`, as many as the image has; 0 if all values are known."""
    text_layers: int = 0
    """Layers of the encoder of texts, if a column holds texts."""
    text_width: int = 0
    """Its width."""
    text_model: PretrainedText | None = None
    """A frozen encoder in front of it; None for one that is trained as a whole."""
    image_factor: int = 1
    """Pixels of `Conditions.image` along the side of one input of the network: more than 1 for latents."""

    def __post_init__(self) -> None:
        names = [one.name for one in self.columns]
        if CLASS in names or len({*names}) < len(names):
            raise RequestError(f"columns = {', '.join(names)} must have other names than {CLASS}, and each its own")
        if len(texts := [one.name for one in self.columns if one.kind == TEXT]) > 1:
            raise RequestError(f"columns {' and '.join(texts)} are captions, and a run has one such column")

    @classmethod
    def numbered(cls, classes: int = 0, augment_inputs: int = 0) -> ConditionFormat:
        """Return the format of so many classes without names."""
        return cls(tuple(map(str, range(classes))), augment_inputs)

    @property
    def facts(self) -> tuple[ColumnFacts, ...]:
        """Facts on all columns, the class first."""
        return (*([ColumnFacts(CLASS, CLASS, tuple(self.classes))] if self.classes else []), *self.columns)

    @property
    def text(self) -> ColumnFacts | None:
        """Facts on the column of texts, of which there is at most one; None without it."""
        return next((one for one in self.columns if one.kind == TEXT), None)

    @property
    def _facts_by_name(self) -> dict[str, ColumnFacts]:
        return {one.name: one for one in self.facts}

    @property
    def can_be_dropped(self) -> bool:
        """True if images have a condition that `Conditions.dropped` hides."""
        return bool(self.facts)

    @property
    def inputs(self) -> int:
        """Upper bound of the rows of all layers that embed conditions, the null class and the mask among them."""
        # A channel of the input has 9 places of a convolution.
        places = 9 * self.image_factor**2
        counts = (one.inputs * (places if one.kind in IMAGE_KINDS else 1) for one in self.facts)
        return 1 + AUGMENT_INPUTS + 9 * self.mask_channels + sum(counts)

    @property
    def input_channels(self) -> int:
        """Channels that the conditions add to the input of a network: masks, and images that are conditions."""
        return self.mask_channels + self.image_factor**2 * sum(one.inputs for one in image_columns(self.columns))

    @property
    def spans(self) -> tuple[Span, ...]:
        """Places of the values of each condition in `Conditions`, the class first; () without other columns."""
        return tuple(self.places.values()) if self.columns else ()

    @property
    def places(self) -> dict[str, Span]:
        """Place of the values of each condition in `Conditions` by its name, the class first."""
        places, ends = dict[str, Span](), dict[str, int]()
        for one in self.facts:
            kind = kind_of(one.kind)
            start = ends.get(kind.field, 0)
            ends[kind.field] = start + kind.width(one)
            places[one.name] = (kind.field, start, ends[kind.field])
        return places

    def guidance(self, scale: GuidanceScale) -> GuidanceScale:
        """Return a scale in its usual form: weights other than 1, in the order of `in_turn`; or a number for all.

        RequestError if there is no condition of a name.
        """
        if not isinstance(scale, tuple):
            return scale
        for name, _ in scale:
            if name not in self.places:
                raise RequestError(f"guidance of {name!r:.60}, which {self._unknown(name)}")
        told = in_turn(scale)
        if not told:
            return 1.0
        if len(told) == 1 and {*told[0][1]} == {*self.places}:
            return told[0][0]  # all conditions in one turn: the same as one number
        return tuple((name, weight) for weight, names in told for name in names)

    def turns(self, weights: Weights) -> list[tuple[float, tuple[Span, ...]]]:
        """Return (weight, places of the conditions that are still hidden) of each estimate of `GuidedInTurn`.

        The first estimate is that with the conditions of weight 1 alone. Conditions of weight 0 are hidden in all.
        """
        places, told = self.places, in_turn(weights)
        hidden = [name for _, names in told for name in names]
        made = [(1.0, tuple(places[name] for name in hidden))]
        for weight, names in told:
            hidden = [name for name in hidden if name not in names]
            if weight != 0:
                made.append((weight, tuple(places[name] for name in hidden)))
        return made

    def arguments(self, told: Conditions) -> dict[str, Tensor | None]:
        """Return the conditions of images by name of column, as somebody's own network takes them; without the class.

        See `ConditionKind.argument`. An absent condition is None.
        """
        found: dict[str, Tensor | None] = {}
        places = self.places
        for one in self.columns:
            name, start, stop = places[one.name]
            values = getattr(told, name)
            found[one.name] = None if values is None else kind_of(one.kind).argument(one, values[:, start:stop])
        return found

    def concerns(self, given: Given) -> list[str]:
        """Return why samples with these conditions may be poor, such as a number that no training image is near to."""
        facts = self._facts_by_name
        found = list[str]()
        for name, values in given:
            said = (kind_of(facts[name].kind).concern(facts[name], value) for value in values)
            lines = list(dict.fromkeys(filter(None, said)))
            found += lines[:_MOST_CONCERNS]
            if more := len(lines[_MOST_CONCERNS:]):
                found.append(f"{name}: the same holds for {more:,} more values")
        return found

    def untold(self, given: Given) -> list[str]:
        """Return the names of the columns that some samples are not told."""
        facts = self._facts_by_name
        return [
            name for name, values in given if any(not kind_of(facts[name].kind).show(facts[name], v) for v in values)
        ]

    def check_guided(self, scale: GuidanceScale, given: Given) -> None:
        """Raise RequestError if a weight is of a condition that all samples lack."""
        for name, weight in scale if isinstance(scale, tuple) else ():
            facts = self._facts_by_name[name]
            values = dict(given).get(name, ())
            if weight != 1 and not any(kind_of(facts.kind).show(facts, value) for value in values):
                raise RequestError(
                    f"guidance of {name} = {weight:g} has no effect, as no sample has a value of it; give one: "
                    f"--given {name}=VALUE, or omit its guidance"
                )

    @property
    def usual(self) -> Given:
        """Default conditions of samples, such as all classes in turn: see `ConditionKind.usual`."""
        return tuple((one.name, kind_of(one.kind).usual(one)) for one in self.facts)

    def blank(self, count: int) -> Conditions:
        """Return conditions of so many images, all zeros and not augmented, to measure with."""
        import torch

        one = self.conditions(self.usual, [0])
        # New tensors, as a mode of torch may be active in which tensors have shapes alone.
        return one.apply(lambda each: torch.zeros(count, *each.shape[1:], dtype=each.dtype))

    def conditions(self, given: Given, indices: Sequence[int]) -> Conditions:
        """Return the conditions of the samples of these numbers, on the CPU."""
        return conditions_of(self.columns_of(given, indices).values())

    def columns_of(self, given: Given, indices: Sequence[int]) -> dict[str, Column]:
        """Return the columns of the samples of these numbers."""
        facts, made = self._facts_by_name, dict[str, Column]()
        for name, values in given:
            chosen = kind_of(facts[name].kind).stacked([values[i % len(values)] for i in indices])
            made[name] = Column(name, facts[name].kind, chosen, facts[name].categories)
        return made

    def parse(self, given: Mapping[str, object]) -> Given:
        """Return the conditions of samples from requested values by name of column.

        A value may be a sequence, which samples cycle through; None and NaN hide it. Columns without a request, or
        with (), have the values of `usual`. RequestError for an unknown name or value.
        """
        known = self._facts_by_name
        if not isinstance(given, Mapping):
            raise RequestError(f'given = {given!r:.60} must be a dict, such as {{"class": "cat"}}')
        for name in given:
            if name not in known:
                raise RequestError(f"given {name!r} {self._unknown(name)}")
        usual, found = dict(self.usual), []
        for name, facts in known.items():
            kind, words = kind_of(facts.kind), _words(given.get(name, ()))
            told = (kind.unknown(facts) if _is_missing(word) else kind.parse(facts, word) for word in words)
            found.append((name, tuple(told) or usual[name]))
        return tuple(found)

    def crossed(self, grid: ConditionGrid, given: Mapping[str, object]) -> tuple[Given, CellNames]:
        """Return the conditions of all cells of a grid, row by row, and the captions of its columns and rows.

        Conditions outside of the grid have one value, or are hidden. RequestError for an unknown name or value.
        """
        known, told, axes = self._facts_by_name, self.parse(given), dict[str, tuple[Any, ...]]()
        for name, asked in grid.axes:
            if name not in known:
                raise RequestError(f"grid {name!r:.60} {self._unknown(name)}")
            if name in given:
                raise RequestError(f"grid and given both have {name!r}; give it once")
            axes[name] = axis_values(known[name], asked)
        names = [
            tuple(f"{name}={kind_of(known[name].kind).show(known[name], value)}" for value in values)
            for name, values in axes.items()
        ]
        first, across = next(iter(axes.items()))
        if math.prod(map(len, axes.values())) > MOST_CELLS:
            raise RequestError(f"grid has over {MOST_CELLS:,} cells; give fewer values, such as NAME=LOW..HIGH:5")
        found = list[tuple[str, tuple[Any, ...]]]()
        for name, values in told:
            if name == first:
                values = across
            elif name in axes:
                values = tuple(value for value in axes[name] for _ in across)
            elif name not in given:
                values = (kind_of(known[name].kind).unknown(known[name]),)
            elif len(values) > 1:
                raise RequestError(f"given {name!r} has {len(values)} values, and cells of a grid share one; give one")
            found.append((name, values))
        shared = "".join(self.captions(tuple(one for one in found if one[0] not in axes), 1)[:1])
        return tuple(found), CellNames(names[0], names[1] if names[1:] else (), (shared,) if shared else ())

    def _unknown(self, name: str) -> str:
        known = self._facts_by_name
        hint = suggest(name, known) if known else "; this run has no conditions, so omit it"
        return f"is not a condition of this run{hint}"

    def with_label(self, given: Mapping[str, object] | None, label: object) -> Mapping[str, object]:
        """Return the requested conditions, with the classes of `--label`. None and () request nothing."""
        given = {} if given is None else given
        words = [] if label is None else _words(label)
        if not words or not isinstance(given, Mapping):  # `parse` refuses the latter
            return given
        if CLASS in given:
            raise RequestError(f"label and given {CLASS!r} are the same; give one of them")
        if not self.classes:
            raise RequestError(f"label = {words[0]!r}, but this run has no classes; omit --label")
        return {**given, CLASS: words}

    def with_prompts(self, given: Mapping[str, object], prompts: object) -> Mapping[str, object]:
        """Return the requested conditions, with captions that samples cycle through. None and () request nothing."""
        words = [] if prompts is None else _words(prompts)
        if not words or not isinstance(given, Mapping):  # `parse` refuses the latter
            return given
        if self.text is None:
            raise RequestError("a prompt needs a run that learned captions, by --condition text; omit it")
        if self.text.name in given:
            raise RequestError(f"prompt and given {self.text.name!r} are the same; give one of them")
        return {**given, self.text.name: words}

    def read_negative(self, negative: str) -> tuple[int, ...]:
        """Return the tokens of a text that samples are led away from; () for "".

        RequestError if the run has no texts, or the text is too long.
        """
        if not isinstance(negative, str):
            raise RequestError(f"negative = {negative!r:.60} must be one text, such as 'dark'")
        if not negative.strip():
            return ()
        if self.text is None:
            raise RequestError("a negative prompt needs a run that learned captions, by --condition text; omit it")
        tokens: tuple[int, ...] = kind_of(TEXT).parse(self.text, negative)
        return tokens if tokens[0] >= 0 else ()  # of a text without a word nothing is left

    def check_negative(self, scale: GuidanceScale) -> None:
        """Raise RequestError if guidance of this scale does not lead away from a negative text."""
        if scale == 1:
            raise RequestError("a negative prompt has no effect with guidance = 1; give --guidance 2, or omit it")
        name = self.text.name if self.text else TEXT
        if isinstance(scale, tuple) and dict(scale).get(name, 1.0) in (0.0, 1.0):
            raise RequestError(
                f"a negative prompt needs guidance of {name}, whose weight is {dict(scale).get(name, 1.0):g}; give "
                f"--guidance {name}=2,…, or omit it"
            )

    def rare_words(self, text: str) -> list[str]:
        """Return the words of a prompt that the training captions have at most once; [] without texts."""
        return [] if self.text is None else TextKind().rare_words(self.text, text)

    def show_text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; "" for () and without texts."""
        return "" if self.text is None or not tokens else kind_of(TEXT).show(self.text, tokens)

    def read_words(self, words: Iterable[str]) -> dict[str, object]:
        """Parse the conditions of a command line, such as "age=60" or "class=cat,dog"."""
        known, given = self._facts_by_name, dict[str, object]()
        for word in words:
            name, equals, text = word.partition("=")
            if not (name and equals and text):
                raise RequestError(f"given {word!r} must be NAME=VALUE, or NAME=VALUE,VALUE to cycle through values")
            if name in given:
                raise RequestError(f"given {name!r} comes twice; separate its values by commas: {name}=VALUE,VALUE")
            # A comma may be part of the name of a category, of a caption, and of a path.
            whole = name in known and kind_of(known[name].kind).is_one_value(known[name], text)
            given[name] = [text] if whole else text.split(",")
        return given

    def rows(self, columns: Iterable[Column], rows: Any) -> Given:
        """Return the conditions of the images at these rows. Columns that the run does not have are left out."""
        known = self._facts_by_name
        wanted = ((one, kind_of(one.kind)) for one in columns if one.name in known)
        return tuple((one.name, kind.listed(kind.pick(one.values[rows], None))) for one, kind in wanted)

    def names(self, given: Given, count: int) -> list[str]:
        """Return names that samples cycle through: the class alone, or all conditions, such as "age=60 class=cat".

        A caption is without the name of its column.
        """
        return [" ".join(map(self._named, shown)) for shown in self._cycled(given, count)]

    def captions(self, given: Given, count: int) -> list[str]:
        """Return `names` as captions of pictures, such as 'age=60.2, "a cat", width=3'.

        Numbers have as few digits as tell samples apart, and a text is in quotes if it has company.
        """

        def caption(shown: Sequence[Shown]) -> str:
            quoted = ((facts, f'"{text}"' if facts.kind == TEXT and len(shown) > 1 else text) for facts, text in shown)
            return ", ".join(map(self._named, quoted))

        return [caption(shown) for shown in self._cycled(given, count, rounded=True)]

    def file_names(self, given: Given, count: int) -> list[str]:
        """Return `names` of 40 characters for files: texts are cut first, then categories, and numbers never."""

        def file_name(shown: Sequence[Shown]) -> str:
            parts = [*shown]
            for texts in (True, False):
                for i, (facts, text) in enumerate(parts):
                    over = len(" ".join(map(self._named, parts))) - LONGEST_FILE_NAME
                    if over > 0 and (facts.kind == TEXT if texts else facts.kind not in _NUMBERS):
                        parts[i] = (facts, text[: max(0, len(text) - over)].rstrip())
            return " ".join(self._named(part) for part in parts if part[1])

        return [file_name(shown) for shown in self._cycled(given, count)]

    def _named(self, shown: Shown) -> str:
        """Return a value with the name of its column; a text, and the class of a run of classes alone, without it."""
        facts, text = shown
        return f"{facts.name}={text}" if self.columns and facts.kind != TEXT else text

    def _cycled(self, given: Given, count: int, rounded: bool = False) -> list[list[Shown]]:
        """Return the known values of each sample as text, until they repeat."""
        facts = self._facts_by_name
        lengths = [len(values) for _, values in given] or [0]
        cycle = min(math.lcm(*lengths), max(*lengths, count, _LONGEST_CYCLE))
        shown = list[tuple[ColumnFacts, list[str]]]()
        for name, values in given:
            one, kind = facts[name], kind_of(facts[name].kind)
            shown.append((one, kind.captions(one, values) if rounded else [kind.show(one, each) for each in values]))
        samples = ([(one, texts[i % len(texts)]) for one, texts in shown] for i in range(cycle))
        return [[part for part in parts if part[1]] for parts in samples]


def given_labels(given: Given) -> tuple[int, ...]:
    """Return the labels that samples cycle through; () without classes."""
    return tuple(dict(given).get(CLASS, ()))


def facts_of(columns: Iterable[Column]) -> tuple[ColumnFacts, ...]:
    """Return the facts on the columns of the training images but the class. RequestError for an unknown kind."""
    others = sorted((one for one in columns if one.name != CLASS), key=lambda one: one.name)
    return tuple(kind_of(one.kind, one.name).facts(one) for one in others)


def _is_missing(word: object) -> bool:
    return word is None or (isinstance(word, float) and math.isnan(word))


def _words(value: object) -> list[object]:
    """Return the values of a sequence, or the one value, with scalars of NumPy and torch as those of Python."""
    one = isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable) or _is_scalar(value)
    words = [value] if one else list(cast(Iterable[object], value))
    return [cast(Any, word).item() if _is_scalar(word) else word for word in words]


def _is_scalar(value: object) -> bool:
    return getattr(value, "ndim", None) == 0
