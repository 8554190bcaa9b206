"""Schema of state.json: a checkpoint with other values in it is damaged, and an older one takes its place.

A checksum says that a file is as it was written, and not who wrote it. Values are checked before anything uses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from unfog.training.length import Length

# Raises ValueError unless the value at a path, such as guard.recent[3], is as it should be.
_Rule = Callable[[str, Any], None]

_HOOKS = ("evaluate", "log", "averages", "preview", "save", "keep the best")
# Beyond it a float, as which JSON may be read elsewhere, misses whole numbers.
_LARGEST = 2**53
_MOST_ROLL_BACKS = 1000  # halve any learning rate to zero


def _rule(what: str, holds: Callable[[Any], bool]) -> _Rule:
    def check(path: str, value: Any) -> None:
        if not holds(value):
            raise ValueError(f"{path} is {repr(value)[:40]}, and should be {what}")

    return check


def _whole(most: int = _LARGEST) -> _Rule:
    # Not isinstance: to Python True is a whole number, and a counter of True would pass.
    return _rule(f"a whole number from 0 to {most}", lambda value: type(value) is int and 0 <= value <= most)


def _optional(rule: _Rule) -> _Rule:
    return lambda path, value: None if value is None else rule(path, value)


def _list_of(rule: _Rule, length: int | None = None) -> _Rule:
    def check(path: str, value: Any) -> None:
        if not isinstance(value, list) or length not in (None, len(value)):
            raise ValueError(f"{path} should be a list{'' if length is None else f' of {length}'}")
        for i, item in enumerate(value):
            rule(f"{path}[{i}]", item)

    return check


def _map_of(rule: _Rule) -> _Rule:
    def check(path: str, value: Any) -> None:
        _DICT(path, value)
        for name, item in value.items():
            rule(f"{path}.{name}"[:80], item)

    return check


def _record(rules: Mapping[str, _Rule], optional: Mapping[str, _Rule] | None = None) -> _Rule:
    """Return the rule of an object with these keys; others are of registered entries, which check their own."""

    def check(path: str, value: Any) -> None:
        _DICT(path, value)
        if missing := sorted(rules.keys() - value.keys()):
            raise ValueError(f"{path} has no {missing[0]}")
        for name, rule in {**rules, **(optional or {})}.items():
            if name in value:
                rule(f"{path}.{name}" if path else name, value[name])

    return check


def _or_empty(rule: _Rule) -> _Rule:
    return lambda path, value: None if value == {} and isinstance(value, dict) else rule(path, value)


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= _LARGEST)


_DICT = _rule("an object", lambda value: isinstance(value, dict))
_TEXT = _rule("a text", lambda value: isinstance(value, str))
_FLAG_OR_NUMBER = _rule("a number", lambda v: isinstance(v, bool) or v in (None, "inf", "-inf", "nan") or _is_number(v))
_NUMBER = _rule("a number", _is_number)
_FINITE = _rule("a finite number", lambda value: _is_number(value) and math.isfinite(value))


def _length(path: str, value: Any) -> None:
    try:
        Length().load_state_dict(value)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not a length of a run ({error})") from error


_SCALER = {
    "scale": _FINITE,
    "growth_factor": _FINITE,
    "backoff_factor": _FINITE,
    "growth_interval": _whole(),
    "_growth_tracker": _whole(),
}
_GUARD = {
    "recent": _list_of(_FINITE),
    "strange": _whole(),
    "refused": _whole(),
    "ordinary": _whole(),
    "anchor": _whole(),
    "roll_backs": _whole(_MOST_ROLL_BACKS),
}
_WINDOW = {
    "loss": _list_of(_NUMBER, 10),
    "count": _list_of(_NUMBER, 10),
    "refused": _whole(),
    "overflows": _whole(),
    "noise": _record({"sums": _list_of(_NUMBER, 2), "count": _whole()}),
}
_LEVELS = {"seen": _whole(), "sums": _list_of(_list_of(_NUMBER, 33), 3)}
_STATE = _record(
    {
        "seen": _whole(),
        "updates": _whole(),
        "microbatch": _whole(),
        "due": _list_of(_rule("the name of a hook", lambda value: value in _HOOKS)),
        "last": _map_of(_optional(_NUMBER)),
        "best": _optional(_NUMBER),
        "keys": _map_of(_TEXT),
        "averages": _list_of(_FINITE),
        "method": _TEXT,
        "lost_shards": _map_of(_TEXT),
        "optimizer": _map_of(_FLAG_OR_NUMBER),
        "guard": _record(_GUARD),
    },
    optional={
        "scaler": _or_empty(_record(_SCALER)),
        "window": _record(_WINDOW),
        "levels": _optional(_record(_LEVELS)),
        "length": _or_empty(_length),
    },
)


def check_state(state: Mapping[str, Any]) -> None:
    """Raise ValueError, with the place and the reason, unless these are the values of a state.json."""
    _STATE("", state)
