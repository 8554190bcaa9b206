"""Guidance scales: one number for all conditions together, or a weight for each by its name. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from numbers import Real
from typing import TypeAlias

from unfog.errors import RequestError

Weights: TypeAlias = tuple[tuple[str, float], ...]
"""(name of a condition, its weight); a condition without an entry has the weight 1."""
GuidanceScale = float | Weights
_LARGEST = 1e30  # as of other settings: float32 has little beyond it


def parse_weights(given: object, setting: str = "guidance") -> Weights:
    """Return the weights of text such as "age=2,stain=1", of a dict, or of pairs. RequestError if they are none."""
    pairs: Iterable[object]
    if isinstance(given, str):
        pairs = [tuple(word.split("=")) for word in given.split(",")]
    else:
        pairs = given.items() if isinstance(given, Mapping) else given if isinstance(given, Iterable) else [given]
    found = dict[str, float]()
    for pair in pairs:
        name, weight = (*pair, "")[:2] if isinstance(pair, tuple) else (pair, "")
        number = _number(weight)
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(name, str) and name.strip()):
            raise RequestError(
                f"{setting} = {given!r:.60} must be a number, or NAME=NUMBER for each condition: age=2,stain=1"
            )
        if not abs(number) <= _LARGEST:  # also of NaN
            raise RequestError(
                f"{setting} of {name.strip()[:60]} = {weight!r:.60} must be a finite number; 1 to 3 is usual"
            )
        if name.strip() in found:
            raise RequestError(f"{setting} of {name.strip()[:60]} is given twice; give one weight")
        found[name.strip()] = number
    if not found:
        raise RequestError(f"{setting} names no condition; give one number for all: 2")
    return tuple(found.items())


def _number(weight: object) -> float:
    if type(weight) is bool or not isinstance(weight, str | Real):
        return math.nan
    try:
        return float(weight)
    except (ValueError, OverflowError):
        return math.nan


def spell_guidance(scale: GuidanceScale) -> str:
    """Return a scale as `--guidance` takes it: "2", or "age=2,stain=1"."""
    if isinstance(scale, tuple):
        return ",".join(f"{name}={weight:g}" for name, weight in scale)
    return f"{scale:g}"


def in_turn(weights: Weights) -> list[tuple[float, list[str]]]:
    """Return (weight, names) in the order in which the network gets conditions, after those of weight 1.

    Weights above 1 come first, from weak to strong, then those below 1, from strong to weak, and 0 last. Where two
    weights cross above 1, or below, their conditions have equal weights, and their order has no effect.
    """

    def place(weight: float) -> tuple[int, float]:
        return (0, weight) if weight > 1 else (2, 0.0) if weight == 0 else (1, -weight)

    told = sorted((place(weight), weight, name) for name, weight in weights if weight != 1)
    return [(weight, [name for *_, name in group]) for weight, group in groupby(told, lambda each: each[1])]


def passes(scale: GuidanceScale) -> int:
    """Return the number of estimates of a guided call: the outputs of the network at one noise level."""
    if isinstance(scale, tuple):
        return 1 + sum(weight != 0 for weight, _ in in_turn(scale))
    return 1 if scale == 1 else 2
