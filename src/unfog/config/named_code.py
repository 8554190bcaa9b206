"""Consent from what a person names: values of flags and keywords that name a part, and a SOURCE."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from unfog.config.describe import Description, describe
from unfog.config.schema import Config
from unfog.config.spec_strings import parse_spec, registry_of
from unfog.custom import CustomPart, consent
from unfog.errors import RequestError

# Settings that are texts, and may name a part. Every other part has a registry of kinds.
_TEXTS = ("sampler.kind", "log.sinks")
_SOURCES = ("source", "reference")


def consent_to_flags(kind: type, table: Mapping[str, Any]) -> None:
    """Consent to the code that a command line names.

    Args:
        kind: request dataclass of the command.
        table: values of its flags and words by name, those of flags as a nested table.
    """
    for each in describe(kind):
        _consent(each, _value(table, each.path), typed=True)


def consent_to_settings(changes: Mapping[str, Any]) -> None:
    """Consent to the code that keywords from Python name, as a nested table of settings."""
    for each in describe(Config):
        _consent(each, _value(changes, each.path), typed=False)


def _value(table: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        # A section from Python may be an instance. It may be that of a run, so its texts are not consent.
        table = table.get(name) if isinstance(table, Mapping) else None
    return table


def _consent(each: Description, value: Any, typed: bool) -> None:
    """Consent to what the value of a setting names. An instance counts if it was `typed`, as a flag."""
    registry = registry_of(each.annotation)
    texts = [value] if isinstance(value, str) else value if isinstance(value, tuple | list) else []
    if registry is not None:
        if isinstance(value, str):
            with suppress(RequestError):  # which the check of the settings says
                value, typed = parse_spec(registry, value), True
        if isinstance(value, Mapping) and value.get("kind") == CustomPart.kind:
            consent.give(str(value.get("path", "")))
        elif isinstance(value, CustomPart) and (typed or not consent.is_from_file(value.path)):
            consent.give(value.path)
    elif each.setting in _TEXTS:
        for text in texts:
            consent.give(consent.part_path(text))
    elif each.path[-1] in _SOURCES:
        for text in texts:
            consent.give_to_source(text)
